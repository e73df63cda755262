"""Names and version of the command's JSON formats, which docs/formats.md describes."""

# incremented when a key is removed or changes its meaning, but not for a new key
VERSION = 1


def stamped(name: str, output: dict) -> dict:
    """Returns an output with the name of its format and the version in front."""
    return {"schema": f"csd.{name}", "version": VERSION} | output
