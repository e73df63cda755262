"""Tables of history.md."""

from bench.lib.common import markdown
from tools.experiment_tables.results import (
    CLASSEVAL,
    GSM8K,
    MATH,
    OWN,
    between,
    fold,
    load,
    only,
)

TRACES = {
    MATH: "MATH",
    CLASSEVAL: "ClassEval",
    GSM8K: "GSM8K, SmolLM2",
    OWN: "own prompts, SmolLM2",
}
# largest trust in a group's context beside a prior, unless a row names another
TRUST = 0.8
LEARNT = {"halves": "the other problems", "call": "earlier problems"}


def prior() -> str:
    rows, lines = load("prior")["rows"], []
    records = sorted(
        (r for r in rows if "ratio" in r),
        key=lambda r: ([*TRACES].index(r["trace"]), r["samples"]),
    )
    for r in records:
        plain = only(
            rows, trace=r["trace"], drafter=f"consensus, {r['prior']}", samples=r["samples"]
        )
        learnt = " and ".join(TRACES.get(x, x) for x in r["learnt"]) or LEARNT[r["prior"]]
        if r["trust"] != TRUST:
            learnt += f", trust {r['trust']}"
        loops = r["trace"] in (MATH, CLASSEVAL) and r["draft_ratio"]
        time = f"{r['draft_ratio']:.2f}" if loops else ""
        lines.append(
            [
                f"{TRACES[r['trace']]}, N = {r['samples']}",
                learnt,
                f"{plain['tau']:.2f}",
                f"{r['tau']:.2f}",
                between(r["ratio"], r["ratio_interval"], 3),
                time,
            ]
        )
    head = ["", "learnt from", "without", "with", "ratio", "drafter's time"]
    return markdown(head, fold(lines))


def prior_live() -> str:
    lines = []
    for r in load("prior_live")["rows"]:
        arms = [f"{r[f'tau, {arm}']:.2f}" for arm in ("none", "prior")]
        clocks = ("seconds", "processor")
        ratios = [between(r[f"{c}, prior"], r[f"{c}, prior, interval"], 2) for c in clocks]
        lines.append([str(r["samples"]), str(r["slots"]), str(r["pairs"]), *arms, *ratios])
    head = [
        "samples",
        "slots",
        "pairs",
        "tau without",
        "tau with",
        "speed, seconds",
        "speed, CPU seconds",
    ]
    return markdown(head, lines)


def votes() -> str:
    lines = [
        [r["engine"], *(f"{r[name]:,}" for name in r if name != "engine")]
        for r in load("vote_steps")["rows"]
    ]
    columns = [name for name in load("vote_steps")["rows"][0] if name != "engine"]
    return markdown(["", *columns], lines)


TABLES = {
    "prior": prior,
    "prior_live": prior_live,
    "votes": votes,
}
