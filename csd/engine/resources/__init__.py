"""Model, caches and memory of an engine."""
