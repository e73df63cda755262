"""Head and log-probabilities of rows, in chunks of rows: no tensor of all rows' logits exists.

For row r with logits z = h W^T (its adapters, divisor and cap included), x = z after the rules of
its sample, temperature T and the set S of tokens that the filters keep:

    raw(t) = z_t - log sum exp z           logprob(t) = x_t / T - log sum over S of exp(x / T)
    d raw(t) / d z = [t] - softmax(z)      d logprob(t) / d x = ([t] - softmax over S of x / T) / T
    entropy H = -sum p log p,  p = softmax(z)       dH / dz = -p (log p + H)

S is a constant to the gradient. The forward runs the sampler's own passes; the backward computes a
chunk's logits again, and adds the weight's gradient in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.engine.requests.slot_edits import Refill, fill_slots, seen_words
from csd.engine.results.logprobs import Measures
from csd.engine.rules.changes import Changes
from csd.gradient.rows import Rows
from csd.kernels.ops import Ops
from csd.kernels.verify.reference_rows import row_logits
from csd.kernels.verify.rules.rows import blocks, change_rows
from csd.kernels.verify.token_logprobs import is_filtered, raw_logprobs
from csd.state.pool import Pool
from csd.state.pool_builder import pool_of
from csd.state.slots import Slots

# numbers of a chunk's logits, and rows of a chunk at most
NUMBERS, MAX_ROWS = 1 << 23, 256


@dataclass(slots=True)
class Chunk:
    """Some of the scoring rows, with the tokens that they score."""

    hidden: slice  # of the scoring rows
    pairs: torch.Tensor  # [T] int64, indices of the scored tokens
    row: torch.Tensor  # [T] int64, from 0 in the chunk
    token: torch.Tensor  # [T] int64


class Scoring:
    """Values and gradients of the log-probabilities of `Rows`, whose samples have one `params`.

    logits: rows of the last hidden states -> their logits, with the sampler's bits. dtype: of
    log-probabilities, float32 or float64.
    """

    def __init__(
        self,
        rows: Rows,
        params: SamplingParams,
        logits: Callable[[torch.Tensor], torch.Tensor],
        ops: Ops,
        vocab: int,
        dtype: torch.dtype,
        entropy: bool,
    ):
        self._logits, self._ops, self.params, self.entropy = logits, ops, params, entropy
        self.vocab, self.dtype, device = vocab, dtype, rows.token.device
        # rows that score tokens, each once
        self.rows, index = rows.row.unique(return_inverse=True)
        self._completions = rows.completions
        # of each of these rows, a token that it scores
        origin = dict(zip(index.tolist(), rows.origin, strict=True))
        self._prefix = [origin[i] for i in range(len(self.rows))]
        self._requests = [
            Request.of(g, prompt, params, range(1), g) for g, prompt in enumerate(rows.prompts)
        ]
        for request in self._requests:
            request.place.group = 0
        self.count = len(rows.target)
        size = max(1, min(MAX_ROWS, NUMBERS // self.vocab))
        order = index.argsort(stable=True)
        bounds = torch.arange(0, len(self.rows) + size, size, device=device)
        cuts = torch.searchsorted(index[order], bounds).tolist()
        self.chunks = [
            Chunk(
                slice(start, min(start + size, len(self.rows))),
                pairs := order[cuts[i] : cuts[i + 1]],
                index[pairs] - start,
                rows.target[pairs],
            )
            for i, start in enumerate(range(0, len(self.rows), size))
        ]
        self._changes: Changes | None = None

    def values(self, chunk: Chunk, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Log-probabilities and raw ones [T] of a chunk's tokens, and entropies [T] if wanted."""
        logits = self._logits(hidden)
        slots, pool = self._slots(chunk)
        x, slots = self._changed(logits, pool, slots)
        tokens = self._ops.token_logprobs(x, pool, slots, chunk.row, chunk.token)
        values = [tokens.logprob, tokens.raw_logprob]
        if x is not logits:
            values[1] = raw_logprobs(logits, self._ops.log_sum, chunk.row, chunk.token)
            if self.params.greedy:
                values[0] = values[1]
        if self.entropy:
            of_rows = Measures(entropy=True).of_rows
            parts = [of_rows(logits[rows])[1]["entropy"] for rows in blocks(len(logits))]
            values.append(torch.cat(parts)[chunk.row])
        return tuple(values)

    def gradient(
        self,
        chunk: Chunk,
        z: torch.Tensor,
        grads: tuple[torch.Tensor | None, ...],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Gradient [R, V] of a chunk's logits z for those of its `values` [T], None for zeros.

        out: [R, V], at least float32, which has the result; fresh memory would cost more than the
        arithmetic.
        """
        of_logprob, of_raw, *of_entropy = grads
        if self.params.greedy and of_logprob is not None:
            of_raw, of_logprob = of_logprob if of_raw is None else of_raw + of_logprob, None
        if of_logprob is not None:
            self._of_processed(chunk, z, of_logprob, out)
        elif of_raw is not None:
            _add_chosen(_softmax(out.copy_(z)), chunk, of_raw)
            of_raw = None
        else:
            out.zero_()
        if of_raw is not None:
            total = _softmax(z.to(out.dtype, copy=True))
            out += _add_chosen(total, chunk, of_raw)
        if of_entropy and of_entropy[0] is not None:
            logp = z.to(out.dtype).log_softmax(-1)
            p = logp.exp()
            logp.clamp_(min=-1e4)
            each = torch.zeros_like(out[:, 0]).index_add_(0, chunk.row, of_entropy[0])
            spread = -(p * logp).sum(-1, keepdim=True)
            out -= p.mul_(each[:, None]).mul_(logp.add_(spread))
        return out

    def _of_processed(
        self, chunk: Chunk, z: torch.Tensor, grad: torch.Tensor, out: torch.Tensor
    ) -> None:
        slots, pool = self._slots(chunk)
        temperature = self.params.temperature
        leaf = out.copy_(z).detach().requires_grad_()
        with torch.enable_grad():
            changed, plain = self._changed(leaf, pool, slots)
            changed = row_logits(changed, torch.arange(pool.rows, device=z.device), pool, plain)
        x = changed.detach()
        if is_filtered(slots, pool.slot.long()):
            p = self._ops.filtered(x, plain)
        else:
            p = _softmax(x.div_(temperature) if changed is leaf else x / temperature)
        total = _add_chosen(p, chunk, grad / temperature)
        if changed is not leaf:
            total = torch.autograd.grad(changed, leaf, total)[0]
        if total is not x:
            out.copy_(total)

    def _changed(
        self, logits: torch.Tensor, pool: Pool, slots: Slots
    ) -> tuple[torch.Tensor, Slots]:
        """Logits after the rules of samples, and the slots without the rules that are applied."""
        if (changes := self._changes) is None:
            return logits, slots
        x = change_rows(logits, pool, slots, changes.rules, changes.asked).x
        return x, changes.without_rules(slots)

    def _slots(self, chunk: Chunk) -> tuple[Slots, Pool]:
        """Slots that are at a chunk's rows, one each, and the pool of their roots."""
        prefixes = self._prefix[chunk.hidden]
        requests = [self._requests[g] for g, _, _ in prefixes]
        before = [self._completions[g][n][:length] for g, n, length in prefixes]
        count, longest, device = len(before), max(1, *map(len, before)), chunk.row.device
        slots = Slots.empty(count, self.vocab, longest, 1, self.dtype, device)
        refills = [Refill(i, request, 0, []) for i, request in enumerate(requests)]
        fill_slots(slots, torch.zeros(count, 1, dtype=torch.int32, device=device), refills)
        slots.generated.copy_(torch.tensor([len(x) for x in before]))
        tokens = [[*x, *[-1] * (slots.tokens.shape[1] - len(x))] for x in before]
        slots.tokens.copy_(torch.tensor(tokens))
        if self.params.repetition_penalty != 1:
            words = [
                seen_words([*request.prompt, *x], slots.seen.shape[1])
                for request, x in zip(requests, before, strict=True)
            ]
            slots.seen.copy_(torch.stack(words))
        self._changes = Changes.of_call(
            self._requests, slots, self.vocab, self._changes, device.type != "cpu"
        )
        if self._changes is not None:
            self._changes.fill(refills)
        return slots, pool_of(slots, count)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax of each row of x [R, V], in place."""
    x.sub_(x.amax(-1, keepdim=True)).exp_()
    return x.div_(x.sum(-1, keepdim=True))


def _add_chosen(p: torch.Tensor, chunk: Chunk, grad: torch.Tensor) -> torch.Tensor:
    """Sum over each row's tokens t of grad ([t] - p), in place of p [R, V]."""
    grad = grad.to(p.dtype)
    each = torch.zeros_like(p[:, 0]).index_add_(0, chunk.row, grad)
    p.mul_(-each[:, None])
    return p.index_put_((chunk.row, chunk.token), grad, accumulate=True)


class _Score(torch.autograd.Function):
    """Log-probabilities of the scoring rows' last hidden states [R, hidden]."""

    @staticmethod
    def forward(
        ctx: Any, scoring: Scoring, head: "Head", hidden: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        kinds = 3 if scoring.entropy else 2
        out = tuple(hidden.new_empty(scoring.count, dtype=scoring.dtype) for _ in range(kinds))
        for chunk in scoring.chunks:
            for x, values in zip(out, scoring.values(chunk, hidden[chunk.hidden]), strict=True):
                x[chunk.pairs] = values.to(x.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, *weights)
        ctx.scoring, ctx.head = scoring, head
        # a token that filters or constraints remove has no gradient
        ctx.finite = out[0].isfinite()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        scoring, (hidden, *weights) = ctx.scoring, ctx.saved_tensors
        if grads[0] is not None:
            grads = torch.where(ctx.finite, grads[0], 0), *grads[1:]
        run = _HeadGradient(ctx.head, hidden, weights, ctx.needs_input_grad[2:])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        most = max((c.hidden.stop - c.hidden.start for c in scoring.chunks), default=0)
        buffer = hidden.new_empty(most, scoring.vocab, dtype=wide)
        for chunk in scoring.chunks:
            part = tuple(None if g is None else g[chunk.pairs] for g in grads)
            z = run.logits(chunk.hidden)
            run.add(chunk.hidden, z, scoring.gradient(chunk, z, part, buffer[: len(z)]))
        return None, None, *run.gradients()


@dataclass(frozen=True, slots=True)
class Head:
    """Function from the last hidden states to logits: z = h W^T / divisor, capped.

    plain: True if the hidden states are the logits themselves, as a module returns them.
    """

    divisor: float = 1.0
    cap: float | None = None
    plain: bool = False


class _HeadGradient:
    """Gradients of the hidden states and the head's weights, chunk by chunk, by plain products.

    weights: W [V, hidden], then A [R, hidden] and B [V, R] of each stack of its adapters; none for
    a plain head.
    """

    def __init__(
        self, head: Head, hidden: torch.Tensor, weights: list[torch.Tensor], needs: tuple[bool, ...]
    ):
        self.head, self.hidden, self.weights = head, hidden, weights
        # products of chunks are added up, which 16 bits would round each time
        self.grads = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if need else None
            for x, need in zip((hidden, *weights), needs, strict=True)
        ]

    def logits(self, rows: slice) -> torch.Tensor:
        h = self.hidden[rows]
        if self.head.plain:
            return h
        weight, *stacks = self.weights
        z = F.linear(h, weight)
        for a, b in zip(stacks[::2], stacks[1::2], strict=True):
            z = z + ((h.to(a.dtype) @ a.mT) @ b.mT).to(z.dtype)
        if self.head.divisor != 1:
            z = z / self.head.divisor
        cap = self.head.cap
        return z if cap is None else torch.tanh(z / cap) * cap

    def add(self, rows: slice, z: torch.Tensor, grad: torch.Tensor) -> None:
        """Add the gradients that follow from that of the chunk's logits z, grad [R, V]."""
        h, (of_hidden, *of_weights) = self.hidden[rows], self.grads
        if self.head.cap is not None:
            grad = grad * (1 - (z.to(grad.dtype) / self.head.cap) ** 2)
        if self.head.divisor != 1:
            grad /= self.head.divisor
        grad = grad.to(h.dtype)
        if self.head.plain:
            if of_hidden is not None:
                of_hidden[rows] += grad
            return
        weight, *stacks = self.weights
        if of_hidden is not None:
            of_hidden[rows] += grad @ weight
        if of_weights[0] is not None:
            # in parts, so that their products reuse one piece of memory
            for part, columns in zip(of_weights[0].split(4096), grad.split(4096, 1), strict=True):
                part += columns.mT @ h
        for i in range(0, len(stacks), 2):
            a, b = stacks[i : i + 2]
            of_out, x = grad.to(a.dtype), h.to(a.dtype)
            inner, (of_a, of_b) = of_out @ b, of_weights[i + 1 : i + 3]
            if of_hidden is not None:
                of_hidden[rows] += inner @ a
            if of_a is not None:
                of_a += inner.mT @ x
            if of_b is not None:
                of_b += of_out.mT @ (x @ a.mT)

    def gradients(self) -> Iterator[torch.Tensor | None]:
        for x, grad in zip((self.hidden, *self.weights), self.grads, strict=True):
            yield None if grad is None else grad.to(x.dtype)


def scores(
    scoring: Scoring, head: Head, hidden: torch.Tensor, weights: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """`Scoring.values` of all tokens [T]; differentiable.

    hidden: [R, hidden] of all rows. weights: of the head, as `_HeadGradient` takes them.
    """
    values: tuple[torch.Tensor, ...] = _Score.apply(scoring, head, hidden[scoring.rows], *weights)
    return values
