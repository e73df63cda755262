"""`csd doctor`: each operation against its reference, on this machine, at small shapes.

A small model of random weights draws a few samples. Each call of an operation is repeated by its
reference on copies on the CPU: integers must be equal, and floats as near to the reference in
float64 as the reference itself is. Then the same call must commit the same tokens by steps of fixed
shape, captured where there is a GPU, by steps that are not, and without drafts.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
import triton

from csd.backends import choose
from csd.engine.call import RunSettings
from csd.engine.engine import Engine
from csd.engine.requests import Request
from csd.engine.sampling import SamplingParams
from csd.kernels.ops import Joined, Ops, reference
from csd.models.config import ModelConfig
from csd.models.pack import pack
from csd.models.random_weights import random_decoder
from csd.state.verdict import Verdict
from csd.state.version import __version__

# the kind of model that is checked where none is given
SMALL = ModelConfig(
    family="qwen3", vocab=499, hidden=64, intermediate=160, layers=2, heads=4, kv_heads=2,
    head_dim=16, context=1024, norm_eps=1e-6, rope_theta=10000.0, qk_norm=True,
)  # fmt: skip
PROMPTS = ([5, 6, 7, 5, 6, 7, 5], [9, 8, 30, 31, 9, 8])
SAMPLES, NODES = 3, 16
# what the caller or another operation makes of a device's own plan has no reference
UNCHECKED = {"plan_attention", "verify_all"}
# what only hands intermediate results on
HANDED_ON = {"tree_attention": ("work", "partials")}


@dataclass(slots=True)
class Check:
    """One operation, or one comparison of whole generations."""

    name: str
    calls: int = 0
    error: str | None = None  # what was wrong first
    worst: float = 0.0  # largest error of a float, as a share of what is allowed

    @property
    def passed(self) -> bool:
        return self.error is None and self.calls > 0


@dataclass(slots=True)
class Report:
    """What was checked, and on what."""

    device: str
    dtype: str
    kernels: str
    versions: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def table(self) -> str:
        head = [f"{name} {version}" for name, version in self.versions.items()]
        lines = [", ".join(head), f"{self.device}, {self.dtype}, kernels={self.kernels!r}", ""]
        for check in self.checks:
            state = "ok" if check.passed else "FAILED"
            row = f"{check.name:34} {check.calls:5} calls  {state:6}  error {check.worst:.2f}"
            lines.append(row + (f"  {check.error}" if check.error else ""))
        lines.append(f"{len(self.checks) - len(self.failed)} of {len(self.checks)} passed in "
                     f"{self.seconds:.1f} s; errors are shares of what is allowed")  # fmt: skip
        return "\n".join(lines)

    def raise_failed(self) -> None:
        """Raises RuntimeError naming the first check that failed, and how to go on."""
        if self.failed:
            first = self.failed[0]
            raise RuntimeError(
                f"csd's check of {first.name} failed on {self.device}: {first.error}. No sample "
                "was drawn. Engine(..., kernels='reference') runs without Triton; please report "
                "the output of `csd doctor`"
            )


def check(
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    config: ModelConfig = SMALL,
    kernels: str | None = None,
    tokens: int = 24,
    exact: bool = False,
) -> Report:
    """Check the operations at the head sizes and with the extras of `config`, in `dtype`.

    kernels, exact: as of `Engine`. tokens: drawn of each sample.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    start = time.perf_counter()
    config = replace(config, vocab=min(config.vocab, 499), layers=2, context=1024)
    ops = choose(kernels, device, dtype)
    report = Report(_name(device), str(dtype).removeprefix("torch."), ops.name, _versions(device))
    found = {n: Check(n) for n in (*_operations(), *ops.joined) if n not in UNCHECKED}

    def draw(compared: bool, static: bool, drafted: bool = True) -> list[list[list[int]]]:
        decoder = random_decoder(config, device, dtype)
        # as that of a checkpoint is
        pack(decoder)
        how: dict[str, Any] = dict(
            kernels=kernels, static=static, exact=exact or None, self_check=False
        )
        with Engine(decoder, max_slots=4, **how) as e:
            if compared:
                e.ops = _compared_ops(e.ops, found)

            def run(tokens: int, drafted: bool) -> list[list[list[int]]]:
                params = SamplingParams(temperature=0.8, max_new_tokens=tokens)
                requests = [
                    Request.of(i, [t % config.vocab for t in ids], params, range(SAMPLES), seed=1)
                    for i, ids in enumerate(PROMPTS)
                ]
                for _ in e.run(requests, RunSettings(budget=NODES, speculate=drafted)):
                    pass
                return [request.result().tokens for request in requests]

            if compared:
                # a step without drafts makes its pool by an operation of its own
                run(1, False)
            return run(tokens, drafted)

    def compare(name: str, want: Any, **how: bool) -> None:
        row = Check(name, calls=1)
        try:
            if draw(False, **how) != want:
                row.error = "other tokens were committed"
        except Exception as error:
            row.error = f"{type(error).__name__}: {error}"[:200]
        report.checks.append(row)

    want = None
    try:
        want = draw(True, static=False)
    except Exception as error:
        # an operation that raises has noted it
        if all(row.error is None for row in found.values()):
            found["verify"].error = f"{type(error).__name__}: {error}"[:200]
    # layers run in one call only where products are loops
    report.checks += [row for row in found.values() if row.calls or row.name != "forward"]
    if want is not None:
        if ops.name == "triton" or device.type == "cpu":
            captured = "captured steps" if device.type == "cuda" else "steps of fixed shape"
            compare(captured, want, static=True)
        if dtype == torch.float32 or exact:
            compare("drafted against plain tokens", want, static=False, drafted=False)
    report.seconds = time.perf_counter() - start
    return report


def _operations() -> list[str]:
    return [f.name for f in fields(Ops) if f.name not in ("name", "joined")]


class _ComparedOps(Ops):
    """Operations one by one, and before them, on copies, what does the work of several."""

    def forward(self, *args: Any) -> torch.Tensor:
        decoder, *given = args
        result: torch.Tensor = decoder.forward(*given, self)
        if "forward" in self.joined:
            self.joined["forward"].run(result, *args)
        return result

    def insert_observed(self, *args: Any) -> None:
        self._compare_joined("insert_observed", args)
        Ops.insert_observed(self, *args)

    def decide(self, *args: Any) -> Any:
        self._compare_joined("decide", args)
        return Ops.decide(self, *args)

    def _compare_joined(self, name: str, args: tuple) -> None:
        joined = self.joined.get(name)
        if joined is not None:
            joined.run(*_mapped(args, torch.clone))


def _compared_ops(own: Ops, found: dict[str, Check]) -> Ops:
    plain = reference()
    # kernels sample every row
    on_paths = own.name == plain.name
    if not on_paths:
        plain = replace(plain, verify=plain.verify_all)
    each = {
        name: _compared(
            getattr(own, name), getattr(plain, name), found.get(name), on_paths and name == "verify"
        )
        for name in _operations()
    }
    joined = {
        name: Joined(
            (),
            _compared(
                whole.run, getattr(plain, name), found.get(name), on_paths and name == "decide"
            ),
        )
        for name, whole in own.joined.items()
        if name != "forward"
    }
    if "forward" in own.joined:
        joined["forward"] = Joined((), _same_bits(own.joined["forward"].run, found["forward"]))
    return _ComparedOps(own.name, **each, joined=joined)


def _compared(
    run: Callable, oracle: Callable, row: Check | None, on_paths: bool = False
) -> Callable:
    """`run`, whose results and written arguments are compared with those of `oracle`.

    on_paths: of verdicts only the rows of accepted paths, since others may be sampled or not.
    """
    if row is None:
        return run

    same = _on_paths if on_paths else _unchanged

    def call(*args: Any, **options: Any) -> Any:
        dropped = HANDED_ON.get(row.name, ())
        given = args, {k: v for k, v in options.items() if k not in dropped}
        eager, exact = (_mapped(given, move) for move in (_to_cpu, _to_double))
        try:
            result = run(*args, **options)
            row.calls += 1
            if row.error is None:
                sides = [(same(oracle(*a, **o)), (a, o)) for a, o in (eager, exact)]
                _compare(row, _tensors((same(result), given)), *map(_tensors, sides))
        except Exception as error:
            row.error = row.error or f"{type(error).__name__}: {error}"[:200]
            raise
        return result

    return call


def _unchanged(x: Any) -> Any:
    return x


def _on_paths(x: Any) -> Any:
    """A verdict, or one among others, without what it says of rows beside the accepted paths."""
    if isinstance(x, tuple):
        return tuple(map(_on_paths, x))
    if not isinstance(x, Verdict):
        return x
    beside = torch.ones_like(x.sample, dtype=torch.bool)
    beside[x.accept_row[x.accept_row >= 0].long()] = False
    return replace(
        x,
        sample=x.sample.masked_fill(beside, -1),
        logprob=x.logprob.masked_fill(beside, 0),
        top_token=x.top_token.masked_fill(beside[:, None], -1),
        top_prob=x.top_prob.masked_fill(beside[:, None], 0),
    )


def _same_bits(run: Callable, row: Check) -> Callable:
    """`run` of a forward pass after its layers one by one, whose result it must have."""

    def call(want: torch.Tensor, *args: Any) -> None:
        *given, node_k, node_v = args
        keys, values = node_k.clone(), node_v.clone()
        try:
            got = run(*given, keys, values)
        except Exception as error:
            row.error = row.error or f"{type(error).__name__}: {error}"[:200]
            raise
        if got is None:
            return
        row.calls += 1
        pairs = zip((got, keys, values), (want, node_k, node_v), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            row.error = row.error or "other bits than its layers' operations"

    return call


def _compare(row: Check, got: list, eager: list, exact: list) -> None:
    if len(got) != len(eager):
        row.error = f"{len(got)} tensors in place of {len(eager)}"
        return
    for a, b, wide in zip(got, eager, exact, strict=True):
        a = a.cpu()
        if a.shape != b.shape:
            row.error = f"shape {tuple(a.shape)} in place of {tuple(b.shape)}"
        elif not b.is_floating_point():
            wrong = int((a != b).sum())
            if wrong:
                row.error = f"{wrong} of {b.numel()} integers differ"
        elif b.numel():
            # memory that none has written yet may hold anything, and holds the same on both sides
            unwritten = ((a == b) | (a.isnan() & b.isnan())) & ~wide.isfinite()
            a, b, wide = (x.masked_fill(unwritten, 0) for x in (a, b, wide))
            # as far from float64 as the reference, and a rounding of a sum of 4,096 numbers
            ours, theirs = ((x.double() - wide.double()).abs().max() for x in (a, b))
            most = 2 * theirs + torch.finfo(a.dtype).eps * 64 * wide.double().abs().max()
            share = float(ours / most) if float(ours) else 0.0
            row.worst = max(row.worst, share)
            if not share <= 1:
                row.error = f"error {float(ours):.2e}, {float(most):.2e} is allowed"
        if row.error:
            return


def _mapped(x: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with every tensor moved, in records, tuples, lists and dicts."""
    if isinstance(x, torch.Tensor):
        return move(x)
    if is_dataclass(x) and not isinstance(x, type):
        moved = {f.name: _mapped(getattr(x, f.name), move) for f in fields(x)}
        return type(x)(**moved)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_mapped(y, move) for y in x))
    if isinstance(x, tuple | list):
        return type(x)(_mapped(y, move) for y in x)
    return {k: _mapped(y, move) for k, y in x.items()} if isinstance(x, dict) else x


def _to_cpu(x: torch.Tensor) -> torch.Tensor:
    # a copy with the same strides, on a CPU too
    return x.detach().to("cpu", copy=True)


def _to_double(x: torch.Tensor) -> torch.Tensor:
    copy = _to_cpu(x)
    return copy.double() if copy.is_floating_point() else copy


def _tensors(x: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(x, note)
    return found


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"


def _versions(device: torch.device) -> dict[str, str]:
    found = {"csd": __version__, "torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cuda":
        found["CUDA"] = torch.version.cuda or "none"
        found["driver"] = str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")())
    return found
