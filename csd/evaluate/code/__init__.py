"""pass@k of code: programs cut from samples, and their tests in a process with limits."""
