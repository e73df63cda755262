"""Loops that draft the trees of a step and fill and prune its pool, for the backend "cpu"."""
