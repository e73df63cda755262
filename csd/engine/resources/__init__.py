"""Model, caches and memory of an engine, which its calls share."""
