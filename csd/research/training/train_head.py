"""`csd.train_head`: trains an EAGLE head of a model on the model's own samples."""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from csd.models.fused.decoder import Decoder
from csd.models.load import load
from csd.research.training.eagle2 import ByStates
from csd.research.training.eagle3 import ByChains
from csd.research.training.recipe import Method, Recipe
from csd.research.training.run import Folder, Run
from csd.research.training.target import Target, refuse_attention
from csd.research.training.texts import digest, read_texts, split
from csd.utils.arguments import check_path, each
from csd.utils.check import shown

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def train_head(
    model: Any,
    traces: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    epochs: int = Recipe.epochs,
    batch: int = Recipe.batch,
    learning_rate: float = Recipe.learning_rate,
    held_out: float = Recipe.held_out,
    every: int = Recipe.every,
    seed: int = Recipe.seed,
    eagle: int = Recipe.eagle,
    token_weight: float | None = None,
    noise: float | None = None,
    depth: int | None = None,
    decay: float | None = None,
    draft_vocab: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    progress: bool = False,
    callback: Callable[[dict[str, Any]], object] | None = None,
) -> list[dict[str, Any]]:
    """Train an EAGLE head, in a folder that `csd.Eagle` reads.

    model: a `transformers` model, a local folder, a hub name or a GGUF file, of a family that the
        fused decoder runs; its weights are not changed.
    traces: one or several trace files, which `csd record` and `record=` write.
    out: a folder without a head. An interrupted run resumes from it, with the same bits as an
        uninterrupted run.
    epochs: number of times each text is read. The model computes the target states again in each
        epoch, so that they are never stored.
    batch: tokens per step; longer texts are cut to this length.
    learning_rate: highest learning rate of AdamW, reached after the first twentieth of the steps.
    held_out: share of the prompts, at least one, whose samples are not trained on, in [0, 0.5];
        with 0 there is no measure on unseen tokens.
    every: steps between two measures of the held-out texts, each of which also saves the run.
    eagle: 2 trains an EAGLE-2 head, whose files are EAGLE-1's; 3 trains an EAGLE-3 head, for a
        model of 4 layers or more. The next two arguments belong to eagle=2, the three after them to
        eagle=3.
    token_weight: weight of the cross-entropy relative to the states' smooth L1 loss; default 0.1.
    noise: uniform noise in (-noise, noise) is added to the states that the head reads; default 0.1.
    depth: tokens of a chain that the head drafts from its own states during training; default 5,
        the depth at which `csd.Eagle` drafts.
    decay: the loss of a chain's token j, from 0, has weight decay^j; default 0.8.
    draft_vocab: number of tokens that the head can draft, the most frequent ones of the samples
        trained on; by default the whole vocabulary, or 32,000 tokens of a larger one.
    dtype: dtype of the head and its products: torch.bfloat16 (with weights in float32 until the
        end), float32 or float64; by default the model's, or float32 for float16.
    device, revision: for a model given by name.
    progress: show a bar with the loss and the held-out acceptance.
    callback: called with each row of the curve, after the run is saved.

    Returns the curve, which is also the folder's `curve.jsonl`: at each measure the step, the
    number of tokens read, and `loss`, `held_out_loss` and `acceptance`, the share of held-out
    tokens that are the head's likeliest when it reads the model's own states; for eagle=3 also
    `by_step`, the same per token of a chain, after the sample's own tokens.

    Raises ValueError or TypeError, naming the argument, if it cannot be used, and OSError for a
    folder that cannot be written.
    """
    of_one_kind = token_weight, noise, depth, decay, draft_vocab
    recipe = Recipe(epochs, batch, learning_rate, held_out, every, seed, eagle, *of_one_kind)
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
        raise ValueError(
            f"traces must have samples that begin within the first batch={batch} tokens"
        )
    refuse_attention(target.config, max(len(text.tokens) for x in prompts for text in x))
    learnt, held_texts = split(prompts, held_out, seed)
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    settings = {"model": name, "texts": digest(prompts), "dtype": str(dtype)} | recipe.settings()
    method: Method
    if recipe.eagle == 3:
        method = ByChains(target, recipe, learnt, dtype)
    else:
        method = ByStates(target, recipe, dtype)
    with closing(Folder(out)) as folder:
        run = Run(method, recipe, learnt, held_texts)
        run.restore(folder.state(settings))
        run.train(folder, settings, progress, callback)
        curve = "".join(f"{json.dumps(row)}\n" for row in run.curve)
        folder.finish(*run.head.published(), curve.encode())
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
        raise ValueError("model must have no LoRA on its lm_head, which the trained head uses")
    return Target(decoder)
