"""Contents of tuples, lists and dicts, in less time than by PyTorch's functions for any type."""


def mapped(function, x):
    """`x` with `function` of each thing in it."""
    if isinstance(x, (list, tuple)):
        made, kind = [mapped(function, y) for y in x], type(x)
        return kind(*made) if hasattr(kind, "_fields") else kind(made)
    if isinstance(x, dict):
        return {key: mapped(function, value) for key, value in x.items()}
    return function(x)


def leaves_of(x) -> list:
    """The things in `x`, in order."""
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (list, tuple)):
        return [x]
    return [leaf for y in x for leaf in leaves_of(y)]
