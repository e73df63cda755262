"""Wrappers of operations that repeat each call with its reference and compare the results."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from csd.engine.self_check.compare import compare
from csd.engine.self_check.coverage import Coverage
from csd.engine.self_check.report import Check
from csd.engine.self_check.tensors import mapped, tensors, to_cpu, to_double
from csd.kernels.ops import FusedOp, Ops, reference
from csd.state.verdict import Verdict

# arguments that are intermediate results, which the references do not take
HANDED_ON = {"tree_attention": ("work", "partials")}
# operations whose results are log-probabilities and probabilities
OF_PROBABILITIES = {"verify", "decide"}
# a device's plan has no reference; the operation that uses it is compared
UNCOMPARED = {"plan_attention"}


def operations() -> list[str]:
    return [f.name for f in fields(Ops) if f.name not in ("name", "fused", "passes")]


def rows_for(ops: Ops) -> dict[str, Check]:
    """A check per operation, by name. `verify_all`, `verify` of more rows, shares its check."""
    return {name: Check(name) for name in (*operations(), *ops.fused) if name != "verify_all"}


class _ComparedOps(Ops):
    """Runs the single operations, and compares the fused ones on copies."""

    def forward(self, *args: Any) -> torch.Tensor:
        decoder, *given = args
        result: torch.Tensor = decoder.forward(*given, self)
        if "forward" in self.fused:
            self.fused["forward"].fn(result, *args)
        return result

    def insert_observed(self, *args: Any) -> None:
        self._compare_fused("insert_observed", args)
        Ops.insert_observed(self, *args)

    def decide(self, *args: Any) -> Any:
        self._compare_fused("decide", args)
        return Ops.decide(self, *args)

    def _compare_fused(self, name: str, args: tuple) -> None:
        fused = self.fused.get(name)
        if fused is not None:
            fused.fn(*mapped(args, torch.clone))


def compared_ops(own: Ops, found: dict[str, Check], coverage: Coverage) -> Ops:
    """Wrap `own`, so that its calls are compared in the checks `found` and noted in `coverage`."""
    plain = reference()
    # Triton's kernels sample every row
    on_paths = own.name != "triton"
    if not on_paths:
        plain = replace(plain, verify=plain.verify_all)
    each: dict[str, Any] = {
        name: compared(
            getattr(own, name),
            None if name in UNCOMPARED else getattr(plain, name),
            found[name.removesuffix("_all")],
            on_paths and name == "verify",
        )
        for name in operations()
    }
    for name in ("plan_attention", "verify", "verify_all", "prompt_attention"):
        each[name] = coverage.watched(name.removesuffix("_all"), each[name])
    fused = {
        name: FusedOp(
            (),
            compared(whole.fn, getattr(plain, name), found[name], on_paths and name == "decide"),
        )
        for name, whole in own.fused.items()
        if name != "forward"
    }
    if "forward" in own.fused:
        fused["forward"] = FusedOp((), _same_bits(own.fused["forward"].fn, found["forward"]))
    return _ComparedOps(own.name, **each, fused=fused)


def compared(
    run: Callable, oracle: Callable | None, row: Check, on_paths: bool = False
) -> Callable:
    """Wrap `run` to compare its results and written arguments with those of `oracle`.

    on_paths: compare only a verdict's rows on accepted paths, since others need not be sampled.
    """
    same = _on_paths if on_paths else _unchanged
    dropped = HANDED_ON.get(row.name.partition(" with ")[0], ())
    least = float(row.name in OF_PROBABILITIES)

    def call(*args: Any, **options: Any) -> Any:
        own = {k: v for k, v in options.items() if k not in dropped}
        row.calls += 1
        try:
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


def _unchanged(x: Any) -> Any:
    return x


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


def _same_bits(run: Callable, row: Check) -> Callable:
    """Wrap a fused forward pass to compare its bits with the result `want` of single layers."""

    def call(want: torch.Tensor, *args: Any) -> None:
        *given, node_k, node_v = args
        keys, values = node_k.clone(), node_v.clone()
        try:
            got = run(*given, keys, values)
        except Exception as error:
            row.fail(error)
            raise
        if got is None:
            return
        row.calls += 1
        pairs = zip((got, keys, values), (want, node_k, node_v), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            row.fail("bits differ from those of its layers' operations")

    return call
