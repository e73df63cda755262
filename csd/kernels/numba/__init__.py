"""Parts that loops share: compilation, cache, threads, vectors, tiles and access to tensors."""
