"""Loops of verification and of what follows it in a step, for the backend "cpu"."""
