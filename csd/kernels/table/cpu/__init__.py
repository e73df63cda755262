"""Loops of the consensus graph's table, for the backend "cpu"."""
