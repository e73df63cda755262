"""Layers of a target whose inputs an EAGLE-3 head reads: a low one, the middle, a high one."""

# layer 2 and the third from the end exist, though of 4 or 5 layers two or three are the same
FEWEST = 4


def read_layers(layers: int) -> tuple[int, int, int]:
    """Layers 2, L // 2 and L - 3 of L, which published heads read, in the order of fc's input."""
    return 2, layers // 2, layers - 3
