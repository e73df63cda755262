"""Audit of recorded samples: which tokens this model, with this seed, would have drawn.

Under `match` a token is a function of model, prompt, seed, sample index and the tokens before it,
so one row of logits is enough to check a claimed token. At every row of the recorded tokens, with s
the perturbed score of an atom (`csd.kernels.verify`):

    gap = s(drawn token) - s(recorded token)         0 where they are the same token
        = distance of the noise from the token's part of the tail's mass, if both are in the tail
        = inf if the recorded token has no probability, or no token is left

In greedy rows scores are logits, after penalties and bans. Rounding moves scores by as much as it
moves logits, so a small gap is a tie, and a large one shows other weights, settings or tokens.

Where a record and the engine have the same bits on every x86 CPU (`has_same_bits`), nothing is a
tie: `BitDifference.find` compares tokens and log-probabilities to the bit.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch

from csd.engine.call import RunSettings
from csd.engine.engine import Engine
from csd.engine.options import SamplingOptions, read_options
from csd.engine.options.params import limited, resolve
from csd.engine.requests.request import Request
from csd.graph.teacher_forcing import TeacherForcing
from csd.kernels.common.noise import REST, SAMPLE, gumbel, philox_words_ref, uniform
from csd.kernels.ops import Ops
from csd.kernels.verify.reference_rows import row_logits, row_scores
from csd.kernels.verify.token_logprobs import no_token
from csd.models.portable import PORTABLE
from csd.state.filters import is_greedy
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.traces.receipt import bits_hash
from csd.traces.traces import Top, Trace
from csd.utils.check import shown


class Auditor(TeacherForcing):
    """`TeacherForcing` that records `gaps`, a list per sample, by its noise key and index."""

    # each node of a slot is one of its own recorded tokens
    verifies_any_pool = False

    def __init__(self, tokens: Mapping[tuple[int, int], list[int]], ops: Ops, rows: int):
        super().__init__(tokens, ops, rows)
        self.gaps: dict[tuple[int, int], list[float]] = {key: [] for key in tokens}
        self.tops: dict[tuple[int, int], list] = {key: [] for key in tokens}

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        forced = super().verify(logits, pool, slots)
        none = no_token(logits)
        logits = logits.masked_fill(none[:, None], 0)
        verdict = self._ops.verify_all(logits, pool, slots)
        drawn = verdict.sample
        # rows of a slot are in the order of its tokens
        keys, samples = slots.key.tolist(), slots.sample.tolist()
        gaps = torch.zeros(pool.rows, dtype=torch.float64)
        for row in (drawn != forced.sample).nonzero()[:, 0].tolist():
            pair = int(drawn[row]), int(forced.sample[row])
            gaps[row] = _gap(row, *pair, logits, pool, slots)
        gaps[none.cpu()] = math.inf
        tops = zip(verdict.top_token.tolist(), verdict.top_prob.tolist(), strict=True)
        for s, gap, top in zip(pool.slot.tolist(), gaps.tolist(), tops, strict=True):
            self.gaps[keys[s], samples[s]].append(gap)
            self.tops[keys[s], samples[s]].append(top)
        return forced


def _gap(
    row: int, drawn: int, recorded: int, logits: torch.Tensor, pool: Pool, slots: Slots
) -> float:
    s, rows = int(pool.slot[row]), torch.tensor([row], device=logits.device)
    if is_greedy(slots, pool.slot[rows].long()):
        x = row_logits(logits[rows], rows, pool, slots)[0].double()
        return float(x[drawn] - x[recorded])
    _, heads, rests = row_scores(logits[rows], rows, pool, slots)
    listed = zip(heads.token[0].tolist(), heads.score[0].double().tolist(), strict=True)
    head = {token: score for token, score in listed if score > -math.inf}
    rest, vocab = rests[0].double(), logits.shape[1]
    if recorded not in head and rest[recorded] == 0:
        return math.inf
    position = slots.generated[s] + pool.depth[row]

    def word(token: int, stream: int) -> torch.Tensor:
        tokens = torch.tensor(token, device=rest.device)
        return philox_words_ref(slots.key[s], tokens, position, slots.sample[s], stream)

    def score(token: int) -> float:
        mass = head.get(token, float(rest.sum().log()))
        return mass + float(gumbel(word(token if token in head else vocab, SAMPLE), torch.float64))

    if drawn in head or recorded in head:
        return max(score(drawn) - score(recorded), 0.0)
    share = rest.cumsum(0) / rest.sum()
    threshold = float(uniform(word(0, REST), torch.float64))
    begin, end = float(share[recorded] - rest[recorded] / rest.sum()), float(share[recorded])
    return max(begin - threshold, threshold - end, 0.0)


# change of perturbed scores by rounding, per dtype: a gap up to this is a tie
TIES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


@dataclass(slots=True)
class Audited:
    """A sample's tokens, with the gap of each (`csd.evaluate.audit`)."""

    problem: int | str
    index: int
    tokens: list[int]
    gaps: list[float] = field(repr=False)
    tops: list[Top] = field(repr=False)  # of this model, at each position
    logprobs: str = ""  # `bits_hash` of this model's log-probabilities

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
        # instead of this model's own end tokens, and of those in `sampling`
        end_token_ids=[i for i in trace.stop_ids if i < config.vocab],
        stop_token_ids=[],
        ignore_eos=False,
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
    forced, key = made[0], requests[0].key
    finished = (sample for request in requests for sample in request.progress.finished.items())
    hashes = {i: bits_hash(sample.logprobs) for i, sample in finished}
    return [
        Audited(trace.problem, i, tokens, forced.gaps[key, i], forced.tops[key, i], hashes[i])
        for i, tokens in sorted(tokens_of.items())
    ]


def has_same_bits(engine: Engine, traces: Iterable[Trace]) -> bool:
    """True if the engine draws the bits of these records, given their weights and options."""
    receipts = [trace.receipt for trace in traces]
    portable = all(r is not None and r["exact_on"] == PORTABLE for r in receipts)
    return portable and engine.exact_on == PORTABLE


# likeliest tokens that a difference shows
SHOWN = 5


class BitDifference(NamedTuple):
    """The first token of a sample whose bits differ."""

    position: int
    recorded: int
    tops: tuple[Top | None, Top]  # the likeliest tokens of the record and of this model

    @classmethod
    def find(cls, sample: Audited, trace: Trace) -> "BitDifference | None":
        """The first difference of an audited sample from its record; None if all bits are equal.

        A record without its likeliest tokens shows the first token that differs, or the first one
        of all.
        """
        assert trace.receipt is not None and trace.indices is not None
        place = trace.indices.index(sample.index)
        there = [tuple(top) for top in trace.top[place]] if trace.top else None
        differ = [i for i, gap in enumerate(sample.gaps) if gap != 0]
        if not differ and trace.receipt["logprobs"][place] == sample.logprobs:
            return None
        if there is not None:
            differ += [i for i, top in enumerate(sample.tops) if tuple(top) != there[i]]
        first = min(differ, default=0)
        tops = there[first] if there else None, sample.tops[first]
        return cls(first, sample.tokens[first], tops)

    def lines(self) -> list[str]:
        """The difference as text, a line for each side's likeliest tokens."""
        text = [f"the first difference is at position {self.position}, token {self.recorded}"]
        for name, top in zip(("record", "here"), self.tops, strict=True):
            if top is not None:
                pairs = zip(*(x[:SHOWN] for x in top), strict=True)
                listed = ", ".join(f"{token} {prob:.9g}" for token, prob in pairs if token >= 0)
                text.append(f"  {name}: {listed}")
        return text


def _runs(indices: list[int]) -> list[range]:
    """Ranges of consecutive indices; indices must be sorted."""
    # consecutive indices differ from their places by the same number
    runs = (list(run) for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]))
    return [range(run[0][1], run[-1][1] + 1) for run in runs]


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
