"""`python -m bench.long`: `bench/e2e/long/` by its short name."""

from bench.e2e.long.__main__ import main

if __name__ == "__main__":
    main()
