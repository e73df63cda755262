"""Requests of a call: prompts with their samples, edits of slots, past samples and errors."""
