"""Loops of a layer's products, norms and gates, for the backend "cpu"."""
