"""Loops that draft the trees of a step, for the backend "cpu"."""
