"""Measurements of csd on a GPU, a file per section: `python -m bench.gpu --out DIR`."""
