"""`csd.generate` and `csd.stream`: many samples of a prompt, the same that plain sampling draws.

One engine is kept per model: by object, as long as the model lives, or by the path or name that the
model was loaded from, until `release` or until others need its memory.
"""

import os
import weakref
from collections.abc import Generator
from typing import Any, Literal, Unpack, overload

import torch

from csd.engine.call import Call
from csd.engine.engine import Engine, ManyPrompts, OnePrompt
from csd.engine.options import GenerateOptions, LoadingOptions, read_options
from csd.engine.options.show import shows
from csd.engine.resources.held_bytes import held_bytes
from csd.engine.results.result import Sample, Samples
from csd.models.text_model import unwrapped
from csd.utils.arguments import options_of
from csd.utils.device import free_bytes
from csd.utils.phases import showing

# for each model: engines by the requested decoder and exactness
_by_model: "weakref.WeakKeyDictionary[Any, dict[tuple, Engine]]" = weakref.WeakKeyDictionary()
# each with its model files, as `_files` lists them; the engine used last comes last
_by_name: dict[tuple, tuple[Engine, list]] = {}

# share that engines kept by name may hold of the memory that is free without them
SHARE = 0.5


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

    Returns `Samples` (a list of them for a list of prompts).

    Raises ValueError or TypeError for arguments that cannot be served, naming the argument, and
    OSError for a `record` or `history` that cannot be written, before the first step. Every later
    error (of a callback, a full disk, or the KeyboardInterrupt of Ctrl-C) has an attribute
    `samples` with the results so far, of the type that this function returns; unfinished samples
    are `cancelled`, and the engine remains usable.
    """
    engine, call = _call(model, prompt, options)
    return engine.results(call)


@shows(GenerateOptions)
def stream(
    model: Any, prompt: Any, **options: Unpack[GenerateOptions]
) -> Generator[tuple[int, Sample], None, None]:
    """Yield (prompt index, Sample) as each sample finishes; the arguments are those of `generate`.

    Closing the iterator cancels the rest and leaves the engine usable. With `until`, samples beyond
    the deciding ones may have been yielded; `generate` returns these as `cancelled`. Errors have
    `samples` as those of `generate` do.

    {options}
    """
    engine, call = _call(model, prompt, options)
    return engine.samples(call)


def release() -> None:
    """Drop the engines that `generate` keeps, with their caches and the models they loaded."""
    of_models = [engine for engines in _by_model.values() for engine in engines.values()]
    for engine in [*of_models, *(engine for engine, _ in _by_name.values())]:
        engine.release()
    _by_model.clear()
    _by_name.clear()


def engine_for(
    model: Any,
    *,
    exact: bool | Literal["cublas", "portable"] | None = None,
    **loading: Unpack[LoadingOptions],
) -> Engine:
    """Returns the engine kept for a model; makes a new one if a path's files have changed.

    exact: as in `Engine`; each value has an engine of its own.
    """
    options: dict[str, Any] = read_options(loading, LoadingOptions)
    if isinstance(model, Engine):
        other = None if model.exact == exact else exact
        for name, value in (options | {"exact": other}).items():
            if value is not None and (name, value) != ("decoder", "auto"):
                raise ValueError(f"{name} must be set when the Engine is made, got {value!r}")
        return model
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        path = os.path.abspath(model) if os.path.exists(model) else os.fspath(model)
        key = (path, exact, *(options | {"device": str(options["device"])}).values())
        files = _files(path)
        if key in _by_name and _by_name[key][1] != files:
            _by_name.pop(key)[0].release()
        if key not in _by_name:
            _make_room(sum(size for _, _, size in files))
            _by_name[key] = Engine(model, **options, exact=exact), files
        # now the one used last
        _by_name[key] = _by_name.pop(key)
        return _by_name[key][0]
    model = unwrapped(model)
    try:
        engines = _by_model.get(model, {})
    except TypeError:
        # an object without a hash or weak references is not a model: Engine raises below
        engines = {}
    wanted = options["decoder"], exact
    if wanted not in engines:
        made = Engine(model, **options, exact=exact)
        # the user's module is held weakly: the cache of engines must not keep it
        made.model.loaded.held = None
        _by_model.setdefault(model, engines)[wanted] = made
    return _by_model[model][wanted]


def _make_room(wanted: int) -> None:
    """Drop the engines kept by name that were used longest ago, until those left and `wanted` bytes
    of another model hold at most SHARE of the memory; an engine that is in a call is kept."""
    held = {key: held_bytes(engine) for key, (engine, _) in _by_name.items()}
    for device in {engine.device for engine, _ in _by_name.values()}:
        own = {key: size for key, size in held.items() if _by_name[key][0].device == device}
        total = sum(own.values())
        limit = SHARE * (free_bytes(device) + total)
        for key, size in own.items():
            if total + wanted <= limit:
                break
            engine = _by_name[key][0]
            if engine.turn.unless_used(engine.release):
                del _by_name[key], held[key]
                total -= size


def _files(path_of_model: str) -> list[tuple[str, int, int]]:
    """Path, time of the last change in ns, and bytes of each of a local model's files."""
    paths = [path_of_model]
    if os.path.isdir(path_of_model):
        paths = [os.path.join(path_of_model, name) for name in sorted(os.listdir(path_of_model))]
    stats = [(path, os.stat(path)) for path in paths if os.path.isfile(path)]
    return [(path, stat.st_mtime_ns, stat.st_size) for path, stat in stats]


def _call(model: Any, prompt: Any, arguments: GenerateOptions) -> tuple[Engine, Call]:
    """Returns the model's engine, and the call of the arguments, which are read once."""
    try:
        # before a model is loaded
        options = read_options(arguments, GenerateOptions)
        loading = {name: options[name] for name in options_of(LoadingOptions)}
        with showing(options["progress"]):
            engine = engine_for(model, **loading)
    except Exception as error:
        if isinstance(model, Engine):
            model.refuse(error)
        raise
    return engine, engine.call_of(prompt, options)
