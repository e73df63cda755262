"""Loops of tree attention, for the backend "cpu"."""
