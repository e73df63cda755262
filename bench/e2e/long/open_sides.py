"""Opens the sides that a run's rows need, each with its fastest settings."""

import importlib.util
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import csd
from bench.e2e.long.plan import CSD, LLAMA, TRANSFORMERS, VLLM, Cell
from bench.e2e.long.prompts import prompt
from bench.e2e.long.sides import Csd, Llama, ends_of, transformers_sides
from bench.e2e.long.vllm_side import NGRAM, Vllm, as_folder
from bench.lib.llama_cpp import copy_in
from bench.lib.models import dtype_of_peers, ids_of, path_of
from bench.lib.settings import settings_of
from csd.kernels.layers.quantized import Quantized
from csd.models.load import Loaded, load

# dtypes of GGUF files that are not quantised
WHOLE = ("F32", "F16", "BF16")


@dataclass
class Opened:
    """Available sides by name, their settings, and the reasons why others are left out."""

    loaded: Loaded
    path: str
    ends: set[int] = field(default_factory=set)
    sides: dict[str, Any] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.loaded.current_generation_config())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all sides but csd's and llama.cpp's, which take a GGUF file as it is."""
        return dtype_of_peers(self.loaded.decoder)

    @property
    def head(self) -> dict:
        return {
            "model": Path(self.path).name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "packed": isinstance(self.loaded.decoder.head, Quantized),
            "settings": self.settings,
            "sides": self.how,
            "left out": self.left_out,
        }

    def of(self, cell: Cell) -> dict[str, Any]:
        """Returns the sides of a cell; for many prompts csd's, on an engine with its slots."""
        if cell.kind != "many":
            return self.sides
        engine = csd.Engine(self.loaded, max_slots=cell.slots)
        sides = {name: Csd(engine, name == "csd", self.settings) for name in cell.sides}
        sides["csd"].draw([*range(1, 9)], 2, 8, 0)
        return sides


def open_sides(
    model: str | None,
    python: str | None,
    cells: list[Cell],
    stack: ExitStack,
    without: Collection[str] = (),
) -> Opened:
    """Open the sides of `cells`, each of which draws once as a warm-up.

    model: a name (`bench/lib/models.py`), a folder or a GGUF file. python: the interpreter of
    vLLM's environment. without: sides to leave out, since all are in memory at once.
    """
    path = path_of(model)
    opened = Opened(load(path, device="cpu"), path)
    opened.left_out |= dict.fromkeys(without, "--without names it")
    engine = csd.Engine(opened.loaded)
    opened.ends = ends_of(engine)
    one = [cell for cell in cells if cell.kind == "one"]
    max_samples, limit = max(cell.samples for cell in one), max(cell.limit for cell in one)
    texts = [prompt(cell.task, cell.limit, i) for cell in one for i in range(3)]
    longest = max(len(ids_of(opened.tokenizer, text)) for text in texts)
    length = min(longest + limit + 64, opened.loaded.config.context)
    _add(
        opened,
        {name: Csd(engine, name == "csd", opened.settings) for name in CSD},
        f"{csd.__version__}, exact={engine.exact}",
    )
    wanted = {side for cell in cells for side in cell.sides} - {*without}
    if wanted & {*TRANSFORMERS}:
        sides = transformers_sides(path, opened.dtype, opened.ends, opened.settings)
        _add(opened, {n: side for n, side in sides.items() if n in wanted}, version("transformers"))
        if opened.settings["repetition_penalty"] != 1 and TRANSFORMERS[1] in wanted:
            # its continuous batching drops the penalty, with a warning
            opened.how[TRANSFORMERS[1]] += ", without the repetition penalty"
    if wanted & {*LLAMA}:
        room = [(longest + c.limit) * c.samples for c in one if {*LLAMA} & {*c.sides}]
        _open_llama(opened, max_samples, max(room), stack)
    if wanted & {*VLLM}:
        _open_vllm(opened, python, max_samples, length, stack)
    for side in opened.sides.values():
        side.draw(ids_of(opened.tokenizer, "Count to ninety."), min(max_samples, 8), 24, 0)
    return opened


def _add(opened: Opened, sides: dict[str, Any], how: str) -> None:
    opened.sides |= sides
    opened.how |= dict.fromkeys(sides, how)


def _open_llama(opened: Opened, max_samples: int, cells: int, stack: ExitStack) -> None:
    path = opened.path
    if importlib.util.find_spec("llama_cpp") is None:
        opened.left_out |= dict.fromkeys(LLAMA, "llama-cpp-python is not installed")
        return
    if not path.endswith(".gguf"):
        opened.left_out |= dict.fromkeys(LLAMA, "the model is no GGUF file")
        return
    from gguf import GGUFReader

    kinds = sorted({x.tensor_type.name for x in GGUFReader(path).tensors} - {*WHOLE})
    files = {LLAMA[0]: (path, "/".join(kinds) or "as the file is")}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if LLAMA[1] not in opened.left_out:
        files[LLAMA[1]] = copy_in(path, opened.dtype, folder / "model.gguf"), str(opened.dtype)
    for name, (file, weights) in files.items():
        if name in opened.left_out:
            continue
        how = f"llama-cpp-python {version('llama-cpp-python')}, weights in {weights}"
        _add(opened, {name: Llama(file, max_samples, cells, opened.settings)}, how)


def _open_vllm(
    opened: Opened, python: str | None, max_samples: int, length: int, stack: ExitStack
) -> None:
    if python is None:
        opened.left_out |= dict.fromkeys(VLLM, "--vllm names no environment")
        return
    to = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    folder = as_folder(opened.path, opened.dtype, opened.tokenizer, to)
    for name, ngram in zip(VLLM, (0, NGRAM), strict=True):
        if name in opened.left_out:
            continue
        try:
            sizes = length, max_samples, ngram
            side = Vllm(python, folder, opened.dtype, opened.ends, *sizes, opened.settings)
        except RuntimeError as error:
            # recorded as left out; the other sides are still measured
            opened.left_out[name] = str(error)
            continue
        stack.callback(side.close)
        drafts = f", ngram of {ngram} tokens" if ngram else ""
        _add(opened, {name: side}, f"{side.version}, CPU build{drafts}")
