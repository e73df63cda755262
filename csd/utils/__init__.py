"""Parts that all packages share: arguments, JSON files, caches, devices, state of torch."""
