"""Loops of a layer's products, norms, rotary embedding and gates, for the backend "cpu".

`decoder.py` runs all layers of a step in one call.
"""
