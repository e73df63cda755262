"""Layers of a target whose inputs an EAGLE-3 head reads: a low one, the middle, a high one."""

# with 4 layers, layers 2 and L - 3 exist; with 4 or 5, some of the three layers are the same
FEWEST = 4


def read_layers(layers: int) -> tuple[int, int, int]:
    """Layers 2, L // 2 and L - 3 of L, which published heads read, in the order of fc's input."""
    return 2, layers // 2, layers - 3
