"""Table that `csd eval` prints at its end."""

from argparse import Namespace
from typing import Any


def named(figures: dict) -> dict:
    """Convert the figures of `csd.evaluate.evaluation.summary` to those of the JSON output."""
    return {
        name: [{k: _interval(v) for k, v in row.items()} for row in value]
        if name == "by_k" else value
        for name, value in figures.items()
    }  # fmt: skip


def _interval(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return dict(zip(("value", "low", "high"), value, strict=True))


def shown(figures: dict, args: Namespace) -> str:
    """Table of accuracy and cost by the number of samples, then totals and cut samples."""
    lines = ["    k  maj@k (95% interval)    pass@k (95% interval)       tokens    seconds"]
    for row in figures["by_k"]:
        maj, passed = (
            "" if row[name] is None else "{:.3f} ({:.3f} to {:.3f})".format(*row[name])
            for name in ("maj_at_k", "pass_at_k")
        )
        lines.append(
            f"{row['k']:5}  {maj:22}  {passed:22} {row['tokens']:12,.0f} {row['seconds']:10,.1f}"
        )
    lines.append(
        f"{figures['problems']} problems, {figures['tokens']:,} tokens in "
        f"{figures['seconds']:.1f} s: {figures['tokens_per_second']:.0f} per second, "
        f"{figures['tau']:.2f} per step of a sample; {figures['answered']:.0%} of the samples "
        "have an answer"
    )
    if args.until_decided and figures["samples_counted"] < figures["samples"]:
        lines.append(
            f"--until-decided: pass@k and maj@k below k = {figures['samples']} count the first "
            f"{figures['samples_counted']} samples of each problem, which are always drawn"
        )
    cut = figures["limited"]
    if cut:
        votes = "still voted" if args.limited_vote else "did not vote"
        limit = "the limit" if args.max_new_tokens is None else f"{args.max_new_tokens} tokens"
        lines.append(
            f"{cut} of {figures['samples_drawn']} samples were cut at {limit} and {votes}: "
            "raise --max-new-tokens"
        )
    if figures["thoughts_cut"]:
        lines.append(f"the thoughts of {figures['thoughts_cut']} samples were cut")
    return "\n".join(lines)
