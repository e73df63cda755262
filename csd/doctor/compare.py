"""Comparison of an operation's results with those of its reference.

An integer must equal that of a reference, a float x must have

    |x - exact| <= r eps max(m, least) + 2 max over its row of |eager - exact|

m is the largest |exact| of the result: another order of summation changes an element by roundings
of its terms, even if the terms cancel to nearly 0.

eager is the reference in the dtype, exact the reference in float64, eps that of the result's dtype.
A row is one index of the first dimension; a vector is one row. least is 1 for log-probabilities,
whose error is that of sums of about 1, of which they are the logarithms, else 0.

`compared_ops` wraps the operations of a backend: each call is repeated with its reference, and the
tensors in its results and written arguments are compared.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch

from csd.doctor.coverage import Coverage
from csd.doctor.report import Check
from csd.engine.requests.request import Request
from csd.engine.results.result import Sample
from csd.kernels.common.noise import SAMPLE, gumbel, philox_words_ref
from csd.kernels.ops import STEP_OPERATIONS, FusedOp, Ops, TextOps, reference
from csd.state.verdict import Verdict


class Difference(NamedTuple):
    """The first token at which two runs of a sample differ."""

    prompt: int
    sample: int
    token: int  # position of the token in the sample
    gap: float  # difference between the scores of the two tokens

    def __str__(self) -> str:
        return f"sample {self.sample} of prompt {self.prompt} from token {self.token} on"


def differences(want: list[Request], got: list[Request]) -> list[Difference]:
    """The first difference of every sample whose tokens differ.

    Each run drew the token with the largest log-probability + noise by its own logits. The gap is
    the difference between the scores of the two drawn tokens, each from the run that drew it.
    """
    return [
        _first(request, a, b)
        for request, other in zip(want, got, strict=True)
        for a, b in zip(request.result(), other.result(), strict=True)
        if a.tokens != b.tokens
    ]


def _first(request: Request, a: Sample, b: Sample) -> Difference:
    pairs = zip(a.tokens, b.tokens, strict=False)
    index = next((t for t, (x, y) in enumerate(pairs) if x != y), None)
    if index is None:
        # one sample ended earlier, which no score explains
        index, gap = min(len(a.tokens), len(b.tokens)), float("inf")
    else:
        gap = abs(_score(request, a, index) - _score(request, b, index))
    return Difference(request.index, a.index, index, gap)


def _score(request: Request, sample: Sample, generated: int) -> float:
    key, token, position, index = (
        torch.tensor([n]) for n in (request.key, sample.tokens[generated], generated, sample.index)
    )
    word = philox_words_ref(key, token, position, index, SAMPLE)
    scale = request.params.temperature
    return sample.logprobs[generated] + (float(gumbel(word, torch.float64)) if scale else 0.0)


# r: a 16-bit result is the rounding of a float32 sum. A float32 result is summed in its own dtype,
# and a sum of 1,024 terms is off by sqrt(1024) / 2 roundings if their signs are random
ROUNDINGS, ROUNDINGS_32 = 4, 16
# integer dtype with as many bytes as a float
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(
    row: Check,
    got: list[torch.Tensor],
    eager: list[torch.Tensor],
    exact: Callable[[], list[torch.Tensor]],
    least: float = 0.0,
) -> None:
    """Record in `row` if `got` is wrong. exact: called only if bits of `got` and `eager` differ.

    An integer must equal that of either reference: if these differ, it depends on rounding.
    """
    if len(got) != len(eager):
        row.fail(f"{len(got)} tensors instead of {len(eager)}")
        return
    wide: list[torch.Tensor] | None = None
    for i, (a, b) in enumerate(zip(got, eager, strict=True)):
        a = a.detach().cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            kinds = (f"shape {tuple(x.shape)} of {x.dtype}" for x in (a, b))
            row.fail(" instead of ".join(kinds))
        elif not _same_bits(a, b):
            wide = exact() if wide is None else wide
            if b.is_floating_point():
                _compare_floats(row, a, b, wide[i], least)
            elif wrong := int(((a != b) & (a != wide[i])).sum()):
                row.fail(f"{wrong} of {a.numel()} integers differ")
        if row.error:
            return


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def _compare_floats(
    row: Check, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, least: float
) -> None:
    # uninitialized memory may hold anything, but holds the same on both sides
    unwritten = ((got == eager) | (got.isnan() & eager.isnan())) & ~exact.isfinite()
    a, b, wide = (x.double().masked_fill(unwritten, 0) for x in (got, eager, exact))
    ours, theirs = ((x - wide).abs() for x in (a, b))
    lines = (wide.shape[0], -1) if wide.dim() > 1 else (1, -1)
    limit = 2 * theirs.reshape(lines).amax(1, keepdim=True)
    size = wide.abs().max().clamp(min=least) if wide.numel() else 0.0
    roundings = ROUNDINGS if got.element_size() == 2 else ROUNDINGS_32
    limit = limit + roundings * torch.finfo(got.dtype).eps * size
    # an error of 0 is allowed even if the bound is 0
    share = torch.where(ours == 0, 0.0, ours).reshape(lines) / limit.clamp(min=1e-300)
    share = share.nan_to_num(nan=torch.inf)
    line = int(share.argmax())
    worst = float(share.view(-1)[line])
    row.worst = max(row.worst, worst)
    if worst > 1:
        values = float(ours.reshape(-1)[line]), float(limit.expand_as(share).reshape(-1)[line])
        row.fail("error {:.2e}, allowed are {:.2e}".format(*values))


def mapped(x: Any, move: Callable[[torch.Tensor], Any]) -> Any:
    """`x` with `move` applied to every tensor, also in dataclasses, tuples, lists and dicts."""
    if isinstance(x, torch.Tensor):
        return move(x)
    if is_dataclass(x) and not isinstance(x, type):
        moved = {f.name: mapped(getattr(x, f.name), move) for f in fields(x)}
        return type(x)(**moved)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(mapped(y, move) for y in x))
    if isinstance(x, tuple | list):
        return type(x)(mapped(y, move) for y in x)
    return {k: mapped(y, move) for k, y in x.items()} if isinstance(x, dict) else x


def to_cpu(x: torch.Tensor) -> torch.Tensor:
    # copy=True: a copy with the same strides, also if the tensor is on the CPU
    return x.detach().to("cpu", copy=True)


def to_double(x: torch.Tensor) -> torch.Tensor:
    """Copy of a CPU tensor; floats become float64."""
    return x.double() if x.is_floating_point() else x.clone()


def tensors(x: Any) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = []
    mapped(x, leaves.append)
    return leaves


# arguments that are intermediate results, which the references do not take
HANDED_ON = {"tree_attention": ("work", "partials")}
# operations whose results are log-probabilities and probabilities
OF_PROBABILITIES = {"verify", "decide", "token_logprobs"}
# a device's plan has no reference; the operation that uses it is compared
UNCOMPARED = {"plan_attention"}


def rows_for(ops: Ops) -> dict[str, Check]:
    """A check per operation, by name. `verify_all`, `verify` of more rows, shares its check."""
    names = [name for name in STEP_OPERATIONS if name != "verify_all"]
    texts = map(_text_operation, TextOps._fields) if ops.texts else ()
    return {name: Check(name) for name in (*names, *texts, *ops.fused)}


def _text_operation(name: str) -> str:
    return f"{name} (texts)"


class _ComparedOps(Ops):
    """Runs the single operations, and compares the fused ones on copies."""

    def forward(self, *args: Any) -> torch.Tensor:
        decoder, *operands = args
        result: torch.Tensor = decoder.forward(*operands, self)
        if "forward" in self.fused:
            self.fused["forward"].fn(result, *args)
        return result

    def insert_observed(self, *args: Any) -> None:
        self._run_compared("insert_observed", args)

    def decide(self, *args: Any) -> Any:
        return self._run_compared("decide", args)

    def finish(self, *args: Any) -> Any:
        return self._run_compared("finish", args)

    def _run_compared(self, name: str, args: tuple) -> Any:
        if name in self.fused:
            self.fused[name].fn(*mapped(args, torch.clone))
        return getattr(Ops, name)(self, *args)


def compared_ops(own: Ops, checks: dict[str, Check], coverage: Coverage) -> Ops:
    """Wrap `own`, so that its calls are compared in the checks `checks` and noted in `coverage`."""
    plain = reference()
    on_paths = not own.samples_all
    if not on_paths:
        plain = replace(plain, verify=plain.verify_all)

    def against_plain(name: str, run: Callable) -> Callable:
        oracle = None if name in UNCOMPARED else getattr(plain, name)
        row = checks[name.removesuffix("_all")]
        return compared(run, oracle, row, on_paths and name in ("verify", "decide"))

    each: dict[str, Any] = {
        name: against_plain(name, getattr(own, name)) for name in STEP_OPERATIONS
    }
    for name in ("plan_attention", "verify", "verify_all", "prompt_attention"):
        each[name] = coverage.watched(name.removesuffix("_all"), each[name])
    fused = {}
    for name, whole in own.fused.items():
        if name == "forward":
            fused[name] = FusedOp((), _rows_have_same_bits(whole.fn, checks[name]))
        else:
            fused[name] = FusedOp((), against_plain(name, whole.fn))
    texts = None
    if own.texts and plain.texts:
        pairs = zip(TextOps._fields, own.texts, plain.texts, strict=True)
        texts = TextOps(
            *(compared(run, want, checks[_text_operation(name)]) for name, run, want in pairs)
        )
    rest = {f.name: getattr(own, f.name) for f in fields(Ops) if f.name not in each}
    return _ComparedOps(**rest | each | {"texts": texts, "fused": fused})


# calls of an operation that are compared in a run: the first ones, and later every fourth
FIRST, EVERY = 32, 4


def compared(
    run: Callable, oracle: Callable | None, row: Check, on_paths: bool = False
) -> Callable:
    """Wrap `run` to compare its results and written arguments with those of `oracle`.

    The first `FIRST` calls are compared, and then every `EVERY`-th.

    on_paths: compare only a verdict's rows on accepted paths, since others need not be sampled.
    """
    same = _on_paths if on_paths else lambda x: x
    dropped = HANDED_ON.get(row.name.partition(" with ")[0], ())
    least = float(row.name in OF_PROBABILITIES)

    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        own = {k: v for k, v in options.items() if k not in dropped}
        row.calls += 1
        calls += 1
        try:
            if oracle is not None and calls > FIRST and calls % EVERY:
                return run(*args, **options)
            before = mapped(_rows_read(args, own), to_cpu)
            result = run(*args, **options)
            if oracle is not None and row.error is None:

                def repeated(move: Callable) -> list[torch.Tensor]:
                    positional, named = mapped(before, move)
                    return tensors((same(oracle(*positional, **named)), (positional, named)))

                ours = tensors((same(result), _rows_read(args, own)))
                compare(row, ours, repeated(torch.clone), lambda: repeated(to_double), least)
            elif result is not None:
                # the copy synchronizes, which raises errors of the launch
                mapped(result, to_cpu)
        except Exception as error:
            row.fail(error)
            raise
        finally:
            row.show()
        return result

    return call


def _rows_read(args: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The same arguments, with the rows that `rows` selects in place of the embedding.

    A large model's embedding has gigabytes in float64, and every pass reads it.
    """
    rows = options.get("rows")
    if rows is None:
        return args, options
    table, *others = args
    numbers = torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
    return (table[rows.clamp(min=0)], *others), options | {"rows": numbers}


def _on_paths(x: Any) -> Any:
    """Mask a verdict's rows that are not on accepted paths, also of verdicts in a tuple."""
    if isinstance(x, tuple):
        return tuple(map(_on_paths, x))
    if not isinstance(x, Verdict):
        return x
    off_path = torch.ones_like(x.sample, dtype=torch.bool)
    off_path[x.accept_row[x.accept_row >= 0].long()] = False
    return replace(
        x,
        sample=x.sample.masked_fill(off_path, -1),
        logprob=x.logprob.masked_fill(off_path, 0),
        top_token=x.top_token.masked_fill(off_path[:, None], -1),
        top_prob=x.top_prob.masked_fill(off_path[:, None], 0),
    )


def _rows_have_same_bits(run: Callable, row: Check) -> Callable:
    """Wrap a fused forward pass to compare its bits with the result `want` of single layers."""

    def call(want: torch.Tensor, *args: Any) -> None:
        *operands, node_k, node_v = args
        keys, values = node_k.clone(), node_v.clone()
        try:
            got = run(*operands, keys, values)
        except Exception as error:
            row.fail(error)
            raise
        if got is None:
            return
        row.calls += 1
        pairs = zip((got, keys, values), (want, node_k, node_v), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            row.fail("bits differ from those of its layers' operations")
        row.show()

    return call
