"""Audit of recorded samples: which tokens this model, with this seed, would have drawn."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from csd.engine.call import RunSettings
from csd.engine.engine import Engine
from csd.engine.options import SamplingOptions, read_options
from csd.engine.options.params import limited, resolve
from csd.engine.requests.request import Request
from csd.kernels.ops import Ops
from csd.traces.traces import Trace
from csd.utils.check import shown
from csd.verify.audit import Auditor

# change of perturbed scores by rounding, per dtype: a gap up to this is a tie
TIES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


@dataclass(slots=True)
class Audited:
    """A sample's tokens, with the gap of each (`csd.verify.audit`)."""

    problem: int | str
    index: int
    tokens: list[int]
    gaps: list[float] = field(repr=False)

    def different(self, tie: float) -> list[int]:
        """Positions of tokens that this model would not have drawn."""
        return [i for i, gap in enumerate(self.gaps) if gap > tie]

    def ties(self, tie: float) -> int:
        """Number of tokens whose difference rounding explains."""
        return sum(0 < gap <= tie for gap in self.gaps)


def audit(engine: Engine, traces: Iterable[Trace], **sampling: Any) -> Iterator[list[Audited]]:
    """Audit the samples of each trace, in one pass over their tokens with one prefill.

    sampling: filters and constraints of `csd.generate` that the samples were drawn with. The
    temperature is the trace's; omitted options come from the model's generation config, as in
    sampling.

    Raises ValueError for a trace without a seed and indices, for several samples with the same
    index, and for tokens beyond the vocabulary.
    """
    read_options(sampling, SamplingOptions)
    for trace in traces:
        yield _audit_one(engine, trace, sampling)


def _audit_one(engine: Engine, trace: Trace, sampling: dict[str, Any]) -> list[Audited]:
    if trace.seed is None or trace.indices is None:
        raise ValueError(
            f"problem {trace.problem} must have a seed and indices, which determine its noise"
        )
    if not trace.samples:
        return []
    if len({*trace.indices}) < len(trace.indices):
        raise ValueError(
            f"problem {trace.problem} must have one sample per index, got indices "
            f"{shown(trace.indices)}"
        )
    config, longest = engine.config, max(map(len, trace.samples))
    if sampling.get("min_new_tokens"):
        # a stop string may have ended all samples earlier
        sampling = sampling | {"min_new_tokens": min(sampling["min_new_tokens"], longest)}
    recorded = dict(
        temperature=trace.temperature,
        stop=[],
        max_new_tokens=longest,
        # instead of this model's own end tokens
        end_token_ids=[i for i in trace.stop_ids if i < config.vocab],
    )
    options = read_options(sampling | recorded, SamplingOptions)
    params = resolve(
        engine.generation_config, options, vocab=config.vocab, tokenizer=engine.tokenizer
    )
    params = limited(params, config.context, len(trace.prompt), f"problem {trace.problem}")
    highest = max(max(trace.prompt), *(max(tokens) for tokens in trace.samples))
    if highest >= config.vocab:
        raise ValueError(
            f"problem {trace.problem} must have tokens in the vocabulary of {config.vocab}, got "
            f"{highest}"
        )
    requests: list[Request] = []
    candidates: dict[tuple[int, int], list[int]] = {}
    tokens_of = dict(zip(trace.indices, trace.samples, strict=True))
    for run in _runs(sorted(tokens_of)):
        request = Request.of(len(requests), trace.prompt, params, run, trace.seed)
        candidates |= {(request.key, i): tokens_of[i] for i in run}
        requests.append(request)
    made: list[Auditor] = []

    def forcing(ops: Ops, rows: int) -> Auditor:
        made.append(Auditor(candidates, ops, rows))
        return made[0]

    for _ in engine.run(requests, RunSettings(budget=0, speculate=False, forcing=forcing)):
        pass
    gaps, key = made[0].gaps, requests[0].key
    return [
        Audited(trace.problem, i, tokens, gaps[key, i]) for i, tokens in sorted(tokens_of.items())
    ]


def _runs(indices: list[int]) -> list[range]:
    """Ranges of consecutive indices; indices must be sorted."""
    runs: list[range] = []
    for i in indices:
        if runs and runs[-1].stop == i:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


def summary(samples: Iterable[Audited], tie: float) -> dict[str, Any]:
    """Figures over samples, which `csd audit` prints."""
    listed = [*samples]
    tokens = sum(len(s.tokens) for s in listed)
    different = sum(len(s.different(tie)) for s in listed)
    ties = sum(s.ties(tie) for s in listed)
    return {
        "samples": len(listed),
        "samples_different": sum(bool(s.different(tie)) for s in listed),
        "tokens": tokens,
        "equal": tokens - ties - different,
        "ties": ties,
        "different": different,
        "different_share": different / max(tokens, 1),
        "tie": tie,
    }
