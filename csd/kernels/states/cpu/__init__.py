"""Loops of layers with a state, for the backend "cpu"."""
