"""What csd does on a GPU, in sections that each write a file: `python -m bench.gpu --out DIR`."""
