"""Requests of a call: prompts, samples in slots, and their history."""
