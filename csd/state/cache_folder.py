"""Small files that csd keeps between processes, in $XDG_CACHE_HOME/csd, by default ~/.cache/csd."""

import hashlib
import os
import uuid
from pathlib import Path


def path_of(kind: str, of: str) -> Path:
    """The file of what is known by the text `of`. Raises RuntimeError where a user has no home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "csd"
    return folder / f"{kind}-{hashlib.sha256(of.encode()).hexdigest()[:16]}.json"


def keep(path: Path, text: str) -> None:
    """Writes a whole file or none; processes may write one at once. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{uuid.uuid4().hex[:12]}")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
