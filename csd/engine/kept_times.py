"""Step times that are kept between processes, so that a machine's later first calls measure none.

A table is only the first guess of a cost model, which follows what steps take
(csd/engine/budget): it decides how many tokens are drafted, never which are drawn. One that
was measured while the machine was disturbed is not kept.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from csd.cpu import compiles
from csd.engine.budget import StepTimesFile, StepTimeTable
from csd.models.config import ModelConfig
from csd.models.decoder import Decoder
from csd.schema.read import read_file
from csd.state.cache_folder import keep, path_of
from csd.state.processor import cpu_name
from csd.state.version import __version__

LOG = logging.getLogger("csd")


class KeptTimes(StepTimesFile):
    """A kept table; `of` is what its steps were, as `timed_as` has it."""

    of: str


def timed_as(decoder: Any, dtype: torch.dtype, ops: str, sizes: list[int]) -> str | None:
    """All that steps' times depend on, as text; None where they depend on what is not known.

    ops: the name of the operations. A decoder of the user's own is not known, nor another process's
    part of the work: all ranks of a model that is split measure at once.
    """
    known = type(decoder) is Decoder and isinstance(decoder.config, ModelConfig)
    if not known or decoder.embedding.device.type != "cpu":
        return None
    by = None
    if compiles():
        from csd.cpu.entry import instruction

        by = instruction(dtype)
    layer, product = decoder.layers[0], getattr(decoder.linear, "product", decoder.linear)
    weights = (layer.qkv, layer.out, layer.gate_up, layer.down, decoder.head)
    what = {
        "csd": __version__, "torch": torch.__version__, "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(), "ops": ops, "loops": compiles(),
        "instruction": by, "threads": torch.get_num_threads(),
        "dtype": str(dtype), "model": asdict(decoder.config),
        # packed ones take other times than plain ones
        "weights": [(str(w.layout), str(w.dtype), w.dim()) for w in weights],
        "product": getattr(product, "__qualname__", type(product).__qualname__),
        "taps": decoder.taps, "sizes": sizes,
    }  # fmt: skip
    return json.dumps(what, sort_keys=True)


def kept_times(of: str) -> StepTimeTable | None:
    """The kept table of steps `of`; None where there is none that can be used."""
    try:
        path = path_of("steps", of)
        return _read(path, of)
    except FileNotFoundError:
        return None
    # a user may have no home
    except (OSError, RuntimeError, ValueError) as error:
        LOG.warning("step times are measured anew: %s", error)
        return None


def keep_times(of: str, table: StepTimeTable) -> None:
    """For later processes, where nothing disturbed the measurement."""
    if not table.steady:
        return
    kept: KeptTimes = {"of": of, "rows": table.sizes, "seconds": table.seconds}
    try:
        keep(path_of("steps", of), json.dumps(kept))
    except (OSError, RuntimeError) as error:
        LOG.warning("step times cannot be kept, so each process measures its own: %s", error)


def _read(path: Path, of: str) -> StepTimeTable:
    found = read_file(path, KeptTimes)
    if found["of"] != of:
        raise ValueError(f"{path} is of other steps")
    try:
        return StepTimeTable(found["rows"], found["seconds"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
