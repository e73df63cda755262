"""`csd.generate` and `csd.stream`: many samples of a prompt, the same ones plain sampling draws.

One engine is kept for each model: by object, as long as the model lives, or by where the model was
loaded from, until `release`.
"""

import weakref
from collections.abc import Generator
from typing import Any, Unpack, overload

import torch

from csd.engine.engine import Engine, ManyPrompts, OnePrompt
from csd.engine.options import GenerateOptions, Options, read_options, shows
from csd.engine.result import Sample, Samples

_by_model: "weakref.WeakKeyDictionary[Any, Engine]" = weakref.WeakKeyDictionary()
_by_name: dict[tuple, Engine] = {}


@overload
def generate(model: Any, prompt: OnePrompt, **options: Unpack[GenerateOptions]) -> Samples: ...
@overload
def generate(
    model: Any, prompt: ManyPrompts, **options: Unpack[GenerateOptions]
) -> list[Samples]: ...
@overload
def generate(
    model: Any, prompt: torch.Tensor, **options: Unpack[GenerateOptions]
) -> Samples | list[Samples]: ...
@shows(GenerateOptions)
def generate(
    model: Any, prompt: Any, **options: Unpack[GenerateOptions]
) -> Samples | list[Samples]:
    """Draw `num_samples` answers to each prompt.

    model: a `transformers` model, a local folder, a hub name, a GGUF file or a `csd.Engine`.
    prompt: a str (taken as it is), a list of message dicts (through the tokenizer's chat
        template), or token ids as a list or 1-D tensor. A list of these, or a 2-D tensor with
        `attention_mask`, gives a list of results. A prompt that occurs again continues the sample
        indices of its earlier occurrence.

    {options}

    Returns `Samples` (a list of them for a list of prompts). Ctrl-C returns what has been drawn;
    samples that had not finished are `cancelled`.

    Raises ValueError or TypeError for arguments that cannot be served, naming the argument.
    """
    engine, drawing = _resolve(model, options)
    return engine.generate(prompt, **drawing)


@shows(GenerateOptions)
def stream(
    model: Any, prompt: Any, **options: Unpack[GenerateOptions]
) -> Generator[tuple[int, Sample], None, None]:
    """As `generate`, but yields (prompt index, Sample) as each sample finishes.

    Closing the iterator cancels the rest and leaves the engine usable. With `until`, samples may
    have been yielded beyond those that decided; `generate` calls them cancelled.

    {options}
    """
    engine, drawing = _resolve(model, options)
    return engine.stream(prompt, **drawing)


def release() -> None:
    """Drop the engines that `generate` keeps, with their caches and the models they loaded."""
    for engine in [*_by_model.values(), *_by_name.values()]:
        engine.release()
    _by_model.clear()
    _by_name.clear()


def engine_for(
    model: Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Engine:
    """The engine `generate` keeps for a model."""
    loading: dict[str, Any] = dict(device=device, dtype=dtype, revision=revision)
    if isinstance(model, Engine):
        for name, value in loading.items():
            if value is not None:
                raise ValueError(f"{name} is set when the Engine is made, got {value!r}")
        return model
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        key = (str(model), revision, str(device), dtype)
        if key not in _by_name:
            _by_name[key] = Engine(model, tokenizer=tokenizer, **loading)
        return _by_name[key]
    if model not in _by_model:
        _by_model[model] = Engine(model, tokenizer=tokenizer, **loading)
    return _by_model[model]


def _resolve(model: Any, options: GenerateOptions) -> tuple[Engine, Options]:
    """The model's engine, and the arguments that are not about loading it."""
    drawing: Any = dict(options)
    try:
        # before a model is loaded for nothing
        read_options(options, GenerateOptions)
        loading = {name: drawing.pop(name, None) for name in ("device", "dtype", "revision")}
        return engine_for(model, tokenizer=drawing.get("tokenizer"), **loading), drawing
    except Exception as error:
        if isinstance(model, Engine):
            model.refuse(error)
        raise
