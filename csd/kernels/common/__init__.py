"""Parts that the operations share: operators, checks, noise, GPUs and sorting."""
