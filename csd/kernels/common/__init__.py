"""Parts that operations share: operators, checks, noise, GPUs, sorting and compilation."""
