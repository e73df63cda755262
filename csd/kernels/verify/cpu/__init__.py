"""Loops of verification, for the backend "cpu"."""
