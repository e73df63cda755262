"""Measurements of csd on a GPU, one file per section: `python -m bench.gpu --out DIR`."""
