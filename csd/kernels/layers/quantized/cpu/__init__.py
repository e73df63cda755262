"""Loops of products with quantised weights: rows as int8, a tile of sums, all tiles of a matrix."""
