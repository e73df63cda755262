"""Sampling for the integrations: one group per prompt, or batch rows grouped by equality."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from csd.engine.call import RunSettings
from csd.engine.engine import Engine
from csd.engine.options import Options
from csd.engine.options.params import SamplingParams
from csd.engine.requests.history import set_history, store_history, wants_top
from csd.engine.requests.request import Carrying, Request
from csd.engine.results.result import Sample, Samples
from csd.graph.history import PastSample
from csd.graph.prior import Prior
from csd.traces.history import History
from csd.utils.arguments import check_seed, check_whole, checked


def draw(
    engine: Engine,
    prompts: list[tuple[list[int], SamplingParams, range]],
    *,
    seed: int,
    history: Any = None,
    keep: bool = True,
    known: Sequence[list[Sample]] | None = None,
    graphs: Sequence[object] | None = None,
    on_tokens: Callable | None = None,
    returns_errors: bool = False,
    **running: Any,
) -> list[Samples]:
    """Draw samples of each (token ids, parameters, sample indices), one group per prompt.

    A prompt with an empty range of sample indices is not read.

    history: as in `csd.generate` for a list of prompts. keep: True adds the drawn samples to a
        `History`. known: samples of each prompt that draft in addition to its history. graphs: of
        each prompt; those with the same object draft for each other.
    running: `budget`, `speculate`, `drafter`, `prior`, as in `csd.generate`. on_tokens,
        returns_errors: as in `csd.engine.call.RunSettings`.

    Raises TypeError or ValueError for an invalid seed, budget, prior or first sample. An error
    after the first step has the samples drawn so far as its attribute `samples`.
    """
    seed = check_seed("seed", seed)
    history = checked(Options, "history", history)
    running = {name: checked(Options, name, value) for name, value in running.items()}
    for _, _, samples in prompts:
        check_whole("first_sample", samples.start, 0)
    requests = [
        Request.of(i, ids, params, samples, seed)
        for i, (ids, params, samples) in enumerate(prompts)
    ]
    set_history(requests, history, True, engine.tokenizer, engine.config.vocab)
    for request, others in zip(requests, known or [[] for _ in requests], strict=True):
        request.history = [*(PastSample.of(s.tokens) for s in others), *request.history]
    for request, graph in zip(requests, graphs or (), strict=graphs is not None):
        request.graph = graph
    settings = RunSettings(
        record_top=wants_top(history),
        on_tokens=on_tokens,
        returns_errors=returns_errors,
        **running,
    )
    saved = history if keep and isinstance(history, History) else None
    if saved is not None:
        saved.check()
    with Carrying(requests):
        try:
            for _ in engine.run([r for r in requests if r.samples], settings):
                pass
        finally:
            store_history(requests, saved)
        return [request.result() for request in requests]


def draw_rows(
    engine: Engine,
    rows: list[list[int]],
    params: SamplingParams,
    *,
    seed: int,
    first_sample: int | list[int] = 0,
    budget: str | int = "auto",
    speculate: bool = True,
    on_tokens: Callable | None = None,
    history: History | None = None,
    prior: Prior | str | bool | None = None,
    keep: bool = True,
    known: Sequence[list[Sample]] | None = None,
) -> list[Sample]:
    """Draw one sample for each row, in the order of `rows`.

    rows: token ids without padding. Equal rows, adjacent or not, are one group: they share the
        prompt's keys and values and its graph, and take consecutive sample indices.
    first_sample: the index of each group's first sample; or a list with each row's own index, in
        which case equal rows whose indices are not consecutive are several groups.
    on_tokens: as in `csd.engine.call.RunSettings`. history, keep, prior: as in `draw`. known: as in
        `draw`, for each row.
    """
    indices = first_sample
    if not isinstance(indices, list):
        first = check_whole("first_sample", indices, 0)
        indices = [first + i for i in earlier_copies(rows)]
    runs: list[list[int]] = []  # row indices of each group
    open_runs: dict[tuple, list[int]] = {}  # by row and the next sample index
    for i, index in enumerate(indices):
        row = tuple(rows[i])
        run = open_runs.pop((row, index), [])
        if not run:
            runs.append(run)
        run.append(i)
        open_runs[row, index + 1] = run
    prompts = [
        (list(rows[run[0]]), params, range(indices[run[0]], indices[run[-1]] + 1)) for run in runs
    ]
    results = draw(
        engine,
        prompts,
        seed=seed,
        budget=budget,
        speculate=speculate,
        on_tokens=on_tokens,
        history=history,
        prior=prior,
        keep=keep,
        known=known and [known[run[0]] for run in runs],
    )
    pairs = zip(runs, results, strict=True)
    drawn = dict(pair for run, samples in pairs for pair in zip(run, samples, strict=True))
    return [drawn[i] for i in range(len(rows))]


def earlier_copies(rows: Sequence[Sequence[int]]) -> list[int]:
    """Returns, for each row, the number of equal rows before it."""
    seen: Counter = Counter()
    counts = []
    for row in map(tuple, rows):
        counts.append(seen[row])
        seen[row] += 1
    return counts
