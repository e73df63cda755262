"""Sampling of many prompts on many machines with Ray Data's `map_batches`, one engine per actor.

Prompts are independent, so actors exchange nothing. A row's samples are a function of (model,
prompt, seed, sample index) alone: Ray replaces an actor that dies and runs its batch again, and
the result is the same.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from csd.engine.engine import Engine
from csd.engine.options import SAMPLING, Options, SamplingOptions, read_options
from csd.engine.options.params import limited, resolve
from csd.integrations.groups import draw
from csd.models.text.prompts import parse
from csd.utils.arguments import check_seed, check_whole, checked
from csd.utils.lazy import check_installed
from csd.utils.other_names import unknown_argument

_RUNNING = {"budget", "speculate", "drafter", "prior"}
_COLUMNS = {"first_sample", "history"}
_OWN = {"prompt", "chat_template_kwargs", "engine", "on_error"}


def sample(
    dataset: Any,
    model: str | Path,
    *,
    num_samples: int,
    seed: int | None = None,
    actors: int = 1,
    batch_size: int = 16,
    ray_args: dict | None = None,
    **options: Any,
) -> Any:
    """Returns `dataset` with additional columns, which have the samples of each row.

    dataset: a `ray.data.Dataset` with a column of prompts: strings, messages or token ids.
    model: a folder, hub name or GGUF file that every actor can load.
    seed: None draws one from torch's default generator.
    actors: number of actors, each with one engine. batch_size: rows that an engine draws at a time.
        An actor holds one of Ray's CPUs, and reading the dataset needs another. Raises RuntimeError
        if Ray has too few free ones, since Ray would wait for them without end.
    ray_args: further arguments of `map_batches`, such as {"num_gpus": 1}.
    options: the other arguments of `Sampler`.
    """
    _check(options)
    check_whole("num_samples", num_samples, 1)
    check_whole("batch_size", batch_size, 1)
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    check_seed("seed", seed)
    check_installed("ray", "ray", "csd.integrations.ray")
    import ray.data

    each = {"num_cpus": 1, "num_gpus": 0, **(ray_args or {})}
    if ray.is_initialized() and "compute" not in each:
        _wait_for_room(ray.available_resources, actors, each["num_cpus"], each["num_gpus"])
    return dataset.map_batches(
        Sampler,
        fn_constructor_args=(model,),
        fn_constructor_kwargs=dict(options, num_samples=num_samples, seed=seed),
        batch_size=batch_size,
        batch_format="pyarrow",
        **{"compute": ray.data.ActorPoolStrategy(size=actors), **(ray_args or {})},
    )


# seconds; Ray frees the resources of a finished dataset within a few
PATIENCE = 10.0


def _wait_for_room(free: Callable[[], dict], actors: int, num_cpus: float, num_gpus: float) -> None:
    """Wait at most PATIENCE seconds until `check_room` passes, then raise its error."""
    start = time.monotonic()
    while True:
        try:
            return check_room(free(), actors, num_cpus, num_gpus)
        except RuntimeError:
            if time.monotonic() - start > PATIENCE:
                raise
        time.sleep(0.2)


def check_room(free: dict[str, float], actors: int, num_cpus: float, num_gpus: float) -> None:
    """Raises RuntimeError if Ray's free resources do not suffice for the actors and a reader.

    num_cpus, num_gpus: per actor.
    """
    for name, each, more in (("CPU", num_cpus, 1), ("GPU", num_gpus, 0)):
        need, have = actors * each + more, free.get(name, 0.0)
        if need > have:
            reader = " and one that reads the dataset" if more else ""
            raise RuntimeError(
                f"{actors} actors of {each:g} {name}s{reader} need {need:g} free {name}s in Ray, "
                f"but only {have:g} are free, so Ray would wait forever. Use fewer actors, call "
                "ray.init(num_cpus=) with more, or pass ray_args={'num_cpus': 0}"
            )


class Sampler:
    """Actor that maps a pyarrow table with prompts to one with their samples.

    num_samples: samples per row, drawn as one group.
    seed: one for the whole dataset; different prompts have independent noise nevertheless.
        Rows with equal prompts get equal samples, unless a column `first_sample` has the index
        of each row's first sample. A column `history` has past samples of each row's prompt,
        lists of token ids or texts, or None; they only draft.
    prompt: the name of the prompts' column. chat_template_kwargs: for prompts that are messages.
    on_error: "raise", or "return": a row with an invalid prompt gets no samples, and the reason in
        a column `error`, which is None for the others.
    engine: options of `csd.Engine`.
    options: filters, max_new_tokens, stop and the like, budget, speculate, drafter, prior, as
        in `csd.generate`. With prior=True the rows of a batch draft for each other, so use it for
        datasets of one user; the tokens do not depend on the batch.

    Adds the columns `texts` [num_samples], `tokens` and `logprobs` [num_samples, length] and
    `finish_reasons` [num_samples].
    """

    def __init__(
        self,
        model: Any,
        *,
        num_samples: int,
        seed: int,
        prompt: str = "prompt",
        chat_template_kwargs: dict | None = None,
        engine: dict | None = None,
        on_error: str = "raise",
        **options: Any,
    ):
        _check(dict(options, on_error=on_error))
        check_whole("num_samples", num_samples, 1)
        check_seed("seed", seed)
        self.engine = Engine(model, **(engine or {}))
        self.num_samples, self.seed, self.prompt = num_samples, seed, prompt
        self.chat_template_kwargs, self.on_error = chat_template_kwargs, on_error
        self.running = {k: checked(Options, k, v) for k, v in options.items() if k in _RUNNING}
        sampling = {k: v for k, v in options.items() if k in SAMPLING}
        self.sampling = read_options(sampling, SamplingOptions)

    def __call__(self, table: Any) -> Any:
        """Draw for a `pyarrow.Table` with a column of prompts; returns it with the new columns."""
        check_installed("pyarrow", "ray", "csd.integrations.ray.Sampler")
        import pyarrow as pa

        lists = {name: table[name].to_pylist() for name in table.column_names if name in _COLUMNS}
        first = lists.get("first_sample", [0] * len(table))
        results = self.draw(table[self.prompt].to_pylist(), first, lists.get("history"))
        columns = {
            "texts": (pa.string(), [r.texts for r in results]),
            "tokens": (pa.list_(pa.int64()), [r.tokens for r in results]),
            "logprobs": (pa.list_(pa.float64()), [r.logprobs for r in results]),
            "finish_reasons": (pa.string(), [r.finish_reasons for r in results]),
        }
        if self.on_error == "return":
            table = table.append_column("error", pa.array([r.error for r in results], pa.string()))
        for name, (kind, values) in columns.items():
            table = table.append_column(name, pa.array(values, pa.list_(kind)))
        return table

    def draw(self, prompts: list, first: list[int], history: list | None = None) -> list:
        """Returns `Samples` per prompt; a row's samples do not depend on the other rows."""
        engine, config = self.engine, self.engine.config
        errors: dict[int, Exception] = {}
        returns = self.on_error == "return"
        rows, _ = parse(
            prompts,
            engine.tokenizer,
            config.vocab,
            chat_template_kwargs=self.chat_template_kwargs,
            errors=errors if returns else None,
        )

        resolved = resolve(
            engine.generation_config,
            self.sampling,
            vocab=config.vocab,
            tokenizer=engine.tokenizer,
        )
        # raises for options that are invalid with every prompt, also if on_error is "return"
        params = limited(resolved, config.context)
        requests = []
        for i, (ids, start) in enumerate(zip(rows, first, strict=True)):
            if i not in errors:
                try:
                    params = limited(resolved, config.context, len(ids), f"prompt {i}")
                except ValueError as error:
                    if not returns:
                        raise
                    errors[i] = error
            count = 0 if i in errors else self.num_samples
            requests.append((ids, params, range(start, start + count)))
        results = draw(
            engine,
            requests,
            seed=self.seed,
            history=history,
            returns_errors=returns,
            **self.running,
        )
        for i, message in errors.items():
            results[i].error = str(message)
        return results


def _check(options: dict) -> None:
    unknown = sorted(set(options) - SAMPLING - _RUNNING - _OWN)
    if unknown:
        raise unknown_argument(unknown[0], SAMPLING | _RUNNING | _OWN | {"num_samples", "seed"})
    for name in options.keys() & (SAMPLING | _RUNNING | {"on_error"}):
        checked(Options, name, options[name])
