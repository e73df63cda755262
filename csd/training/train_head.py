"""`csd.train_head`: an EAGLE head of a model, trained on the model's own samples."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from csd.models.decoder import Decoder
from csd.models.load import load
from csd.schema.arguments import check_path, each
from csd.schema.check import shown
from csd.training.run import Recipe, Run
from csd.training.saved import Folder
from csd.training.target import Target
from csd.training.texts import digest, read_texts, split

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def train_head(
    model: Any,
    traces: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    epochs: int = Recipe.epochs,
    batch: int = Recipe.batch,
    learning_rate: float = Recipe.learning_rate,
    token_weight: float = Recipe.token_weight,
    noise: float = Recipe.noise,
    held_out: float = Recipe.held_out,
    every: int = Recipe.every,
    seed: int = Recipe.seed,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    progress: bool = False,
    callback: Callable[[dict[str, Any]], object] | None = None,
) -> list[dict[str, Any]]:
    """Train an EAGLE-1 or 2 head, whose folder `csd.Eagle` reads.

    model: a `transformers` model, a local folder, a hub name or a GGUF file, of a family that the
        fused decoder runs; its weights are not changed.
    traces: one or several files, as `csd record` and `record=` write them.
    out: a folder without a head. An interrupted run goes on from it, with the bits of one that was
        not.
    epochs: how often a text is read. Each pass of the model computes the states that are learnt
        again, so that they are never stored.
    batch: tokens of a step; a longer text is cut there.
    learning_rate: of AdamW, at its highest, after the first twentieth of the steps.
    token_weight: of the cross-entropy beside the states' smooth L1 loss.
    noise: what is added to the states that the head reads is uniform in (-noise, noise).
    held_out: share of the prompts, at least one, whose samples are not learnt, in [0, 0.5]; with 0
        nothing is known of tokens that were not learnt.
    every: steps between two measures of the held-out texts, each of which also saves the run.
    dtype: of the head and its products: torch.bfloat16 (whose weights are kept in float32 until
        the end), float32 or float64; by default the model's, float32 for float16.
    device, revision: of a model given by name.
    progress: show a bar with the loss and the held-out acceptance.
    callback: is called with each row of the curve, once the run is saved.

    Returns the curve, which is also the folder's `curve.jsonl`: at each measure the step, the
    tokens that were read, and `loss`, `held_out_loss` and `acceptance`, the share of held-out
    tokens that are the head's likeliest one, where the model's own states are before them.

    Raises ValueError or TypeError, naming the argument, for what cannot be served, and OSError for
    a folder that cannot be written.
    """
    recipe = Recipe(epochs, batch, learning_rate, token_weight, noise, held_out, every, seed)
    check_path("out", out)
    one = isinstance(traces, str | os.PathLike)
    paths: list[Any] = [traces] if one else [*each("traces", traces, "a path or a list of paths")]
    for path in paths:
        check_path("traces", path)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {shown(dtype)}")
    target = _target_of(model, device, revision)
    if dtype is None:
        dtype = torch.float32 if target.dtype == torch.float16 else target.dtype
    prompts = read_texts(paths, target.config.vocab, min(batch, target.config.context))
    if not prompts:
        raise ValueError(f"traces must hold samples that begin within batch={batch} tokens")
    learnt, kept = split(prompts, held_out, seed)
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    settings = {"model": name, "texts": digest(prompts), "dtype": str(dtype)}
    folder = Folder(out)
    try:
        run = Run(target, recipe, learnt, kept, dtype)
        run.restore(folder.state(settings | asdict(recipe)))
        run.train(folder, settings | asdict(recipe), progress, callback)
        curve = "".join(f"{json.dumps(row)}\n" for row in run.curve)
        folder.finish(*run.head.published(), curve.encode())
    finally:
        folder.close()
    return run.curve


def _target_of(model: Any, device: Any, revision: str | None) -> Target:
    if not isinstance(model, str | os.PathLike | torch.nn.Module):
        raise TypeError(
            "model must be a transformers model, a local folder, a hub name or a GGUF file, got "
            f"{type(model).__name__}"
        )
    decoder = load(model, device=device, revision=revision, packed=False).decoder
    assert isinstance(decoder, Decoder)
    decoder.begin_call()
    if decoder.head_lora:
        raise ValueError("model must have no LoRA on its head, which the head that is trained uses")
    return Target(decoder)
