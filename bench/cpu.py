"""`python -m bench.cpu`: `bench/e2e/cpu.py` by its short name."""

from bench.e2e.cpu import main

if __name__ == "__main__":
    main()
