"""On-disk cache of step times: a machine measures each kind of step once.

A table is the prior of the cost model (csd/engine/budget), which then follows measured steps. It
affects how many tokens are drafted, never which tokens are drawn. A table from a disturbed
measurement is not cached.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from csd.engine.budget import StepTimesFile, StepTimeTable
from csd.kernels.common.cpu import compiles
from csd.models.fused.config import ModelConfig
from csd.models.fused.decoder import Decoder
from csd.schema.read import naming, parse
from csd.state.cache_folder import path_of, read, save
from csd.state.processor import cpu_name
from csd.state.version import __version__

LOG = logging.getLogger("csd")


class StepTimesEntry(StepTimesFile):
    """Cached table of step times; `of` is the `step_times_key` of its steps."""

    of: str


def step_times_key(decoder: Any, dtype: torch.dtype, ops: str, sizes: list[int]) -> str | None:
    """Cache key: everything that step times depend on, as text. None if there is no complete key.

    None for a user's own decoder, for a model split over processes, whose ranks measure together,
    and on a GPU.

    ops: name of the operations.
    """
    cacheable = type(decoder) is Decoder and isinstance(decoder.config, ModelConfig)
    if not cacheable or decoder.embedding.device.type != "cpu":
        return None
    isa = None
    if compiles():
        from csd.kernels.cpu_ops import instruction

        isa = instruction(dtype)
    layer, product = decoder.layers[0], getattr(decoder.linear, "product", decoder.linear)
    # a layer of experts has None here
    feed_forward = (w for w in (layer.gate_up, layer.down) if w is not None)
    weights = (layer.qkv, layer.out, *feed_forward, decoder.head)
    parts = {
        "csd": __version__, "torch": torch.__version__, "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(), "ops": ops, "loops": compiles(),
        "instruction": isa, "threads": torch.get_num_threads(),
        "dtype": str(dtype), "model": asdict(decoder.config),
        # packed weights take other times than plain weights
        "weights": [(str(w.layout), str(w.dtype), w.dim()) for w in weights],
        "product": getattr(product, "__qualname__", type(product).__qualname__),
        "taps": decoder.taps, "sizes": sizes,
    }  # fmt: skip
    return json.dumps(parts, sort_keys=True)


def load_step_times(key: str) -> StepTimeTable | None:
    """The cached table for a key; None, with a warning unless it is absent, if not usable."""
    try:
        path = path_of("steps", key)
        return _read(path, key)
    except FileNotFoundError:
        return None
    # a user may have no home
    except (OSError, RuntimeError, ValueError) as error:
        LOG.warning("step times are measured again: %s", error)
        return None


def save_step_times(key: str, table: StepTimeTable) -> None:
    """Cache a table, unless its measurement was disturbed."""
    if not table.steady:
        return
    entry: StepTimesEntry = {"of": key, "rows": table.sizes, "seconds": table.seconds}
    try:
        save(path_of("steps", key), json.dumps(entry))
    except (OSError, RuntimeError) as error:
        LOG.warning("step times cannot be cached, so each process measures its own: %s", error)


def _read(path: Path, key: str) -> StepTimeTable:
    data = read(path)
    with naming(f"{path}"):
        entry = parse(data, StepTimesEntry)
    if entry["of"] != key:
        raise ValueError(f"{path} has the times of other steps")
    try:
        return StepTimeTable(entry["rows"], entry["seconds"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
