"""Saved state of a training run in its folder, from which the same command resumes."""

import os
from pathlib import Path
from typing import Any

import torch

from csd.utils.json_files import WholeFile, naming_file

STATE = "training.pt"


class Folder:
    """Folder of a head: the state, with the curve, during training, and the head's files after it.

    Raises ValueError if it already contains a head, or another process is training one there;
    OSError, naming the file, if it cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with naming_file(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "model.safetensors").exists():
            raise ValueError(f"out must be a folder without a head, got {str(path)!r}")
        # checked and locked before the first step
        self._weights = WholeFile(self.path / "model.safetensors")

    def state(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """The last saved state, None for a new run. Raises ValueError if its settings differ."""
        path = self.path / STATE
        if not path.exists():
            return None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            # states of older versions, which trained only EAGLE-2 heads, have no "eagle"
            have = {"eagle": 2} | state["settings"]
        except Exception as error:
            raise ValueError(f"{path} is not the state of a training run: {error}") from error
        keys = [k for k in {**have, **settings} if have.get(k) != settings.get(k)]
        if keys:
            what = ", ".join(f"{k} {have.get(k)!r}, now {settings.get(k)!r}" for k in keys)
            raise ValueError(
                f"{path} was written with other settings ({what}); choose another folder, or "
                "remove it"
            )
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Write the state atomically: a crash leaves the new state or the previous one."""
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
