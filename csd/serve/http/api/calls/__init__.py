"""Calls of tools in a model's text: one parser for whole and streamed texts, and the formats."""
