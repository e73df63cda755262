"""The state of a run in its folder, from which the same command goes on."""

import os
from pathlib import Path
from typing import Any

import torch

from csd.schema.write import WholeFile, naming_file

STATE = "training.pt"


class Folder:
    """A folder for a head: state and curve while it is trained, then its files.

    Raises ValueError where a head is in it already, or another process trains one there; OSError,
    which names the file, where it cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with naming_file(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "model.safetensors").exists():
            raise ValueError(f"out must be a folder without a head, got {str(path)!r}")
        # tried and locked before the first step
        self._weights = WholeFile(self.path / "model.safetensors")

    def state(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """The last saved state, None for a new run. Raises ValueError where its settings differ."""
        path = self.path / STATE
        if not path.exists():
            return None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            # heads of EAGLE-2 were once the only ones
            have = {"eagle": 2} | state["settings"]
        except Exception as error:
            raise ValueError(f"{path} is no state of a training run: {error}") from error
        keys = [k for k in {**have, **settings} if have.get(k) != settings.get(k)]
        if keys:
            what = ", ".join(f"{k} {have.get(k)!r}, now {settings.get(k)!r}" for k in keys)
            raise ValueError(f"{path} was written with {what}; choose another folder, or remove it")
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Write the state: the new one is there whole, or the one before."""
        fresh = self.path / f"{STATE}.new"
        with naming_file(fresh):
            torch.save(state, fresh)
            os.replace(fresh, self.path / STATE)

    def finish(self, config: bytes, weights: bytes, curve: bytes) -> None:
        """Write the head and its curve, and remove the state."""
        for name, data in (("config.json", config), ("curve.jsonl", curve)):
            WholeFile(self.path / name).write([data])
        self._weights.write([weights])
        (self.path / STATE).unlink(missing_ok=True)

    def close(self) -> None:
        self._weights.close()
