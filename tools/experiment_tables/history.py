"""Tables of history.md."""

from bench.lib.common import markdown
from tools.experiment_tables.results import (
    CLASSEVAL,
    GSM8K,
    MATH,
    OWN,
    between,
    change,
    fold,
    load,
    only,
)

# row, trace, live samples, nodes, what a history holds
TAU = (
    ("Qwen2.5-Math, MATH, 12 problems, 4 live", MATH, 4, 4, "tokens"),
    ("Qwen2.5-Math, MATH, 12 problems, 4 live", MATH, 4, 8, "tokens"),
    ("Qwen2.5-Math, MATH, 12 problems, 4 live", MATH, 4, 16, "tokens"),
    ("GPT-4, ClassEval, 6 problems, 2 live", CLASSEVAL, 2, 8, "tokens"),
    ("SmolLM2, GSM8K, 3 problems, 8 live", GSM8K, 8, 8, "tokens"),
    ("the same, with the target's top 8", GSM8K, 8, 8, "top 8"),
)
# trace, live and past samples
MOST = {"MATH": (MATH, 4, 4), "ClassEval": (CLASSEVAL, 2, 2), "GSM8K": (GSM8K, 8, 8)}
KINDS = {
    "history, all of one age": "tokens",
    "each sample an epoch older than the next, its weight halved": "aged",
    "without those that equal a live sample": "no copies",
    "as many more live samples in place of history": "together",
    "another problem's samples": "foreign",
}
ABLATIONS = {
    "a history token at half the weight of a live one": "history_weight=32768",
    "twice": "history_weight=131072",
    "orders 1, 2, 3, 5, 8 in place of 1, 2, 4, 8, 16": "orders=(1, 2, 3, 5, 8)",
    "1, 2, 4, 8, 12, 16": "orders=(1, 2, 4, 8, 12, 16)",
    "one level cost for all samples": "settle=0",
    "level cost 0.85 in place of 0.9": "decay=0.85",
    "0.95": "decay=0.95",
    "trust in a context at most 0.75 in place of 0.85": "trust=0.75",
    "trust 0.95": "trust=0.95",
}
TRACES = {
    MATH: "MATH",
    CLASSEVAL: "ClassEval",
    GSM8K: "GSM8K, SmolLM2",
    OWN: "own prompts, SmolLM2",
}
# largest trust in a group's context beside a prior, unless a row names another
TRUST = 0.8
LEARNT = {"halves": "the other problems", "call": "earlier problems"}
ENDS = {
    "MATH, 20 calls of 4 samples, 4 earlier": f"{MATH}, apart",
    "MATH, 25 prompts in one call, 32 slots": MATH,
    "ClassEval, 40 prompts in one call, 2 samples, 2 earlier": CLASSEVAL,
    "GSM8K, 6 calls of 8 samples, 8 earlier": f"{GSM8K}, apart",
}


def tau() -> str:
    traces, lines, counts = load("history")["traces"], [], (0, 1, 2, 4, 8)
    for label, trace, live, nodes, kind in TAU:
        rows = [
            r
            for r in traces[trace]["rows"]
            if (r["drafter"], r["live"], r["nodes"]) == ("consensus", live, nodes)
        ]
        records = {r["history"]: r["tau"] for r in rows if r["kind"] == kind}
        records[0] = only(rows, history=0, kind="tokens")["tau"]
        cells = (f"{records[n]:.2f}" if n in records else "" for n in counts)
        lines.append([label, str(nodes), *cells])
    return markdown(["trace", "nodes", "none", *map(str, counts[1:])], fold(lines))


def kinds() -> str:
    traces = load("history")["traces"]

    def cell(column: str, drafter: str, kind: str) -> str:
        trace, live, past = MOST[column]
        if kind == "together":
            live, past = live + past, 0
        rows = traces[trace]["rows"]
        row = only(rows, drafter=drafter, live=live, history=past, nodes=8, kind=kind)
        return f"{row['tau']:.2f}"

    lines = [
        [label, *(cell(name, "consensus", kind) for name in MOST)] for label, kind in KINDS.items()
    ]
    label = "the trie given the prompt, with the same history"
    lines.append([label, *(cell(name, "trie-prompt", "tokens") for name in MOST)])
    return markdown(["", *MOST], lines)


def ablations() -> str:
    records = load("history_ablate")["traces"]
    names = {MATH: "MATH, {} problems", CLASSEVAL: "ClassEval, {}", GSM8K: "GSM8K, {}"}
    rows = {trace: records[trace]["rows"] for trace in names}
    head = ["", *(name.format(records[trace]["problems"]) for trace, name in names.items())]
    lines = [
        ["as it is, tau", *(f"{only(x, change='as it is')['tau']:.2f}" for x in rows.values())]
    ]
    for label, field in ABLATIONS.items():
        cells = (change(only(x, change=field)["to_first"]) for x in rows.values())
        lines.append([label, *cells])
    return markdown(head, lines)


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


def _rate(x: float) -> str:
    return f"{x:.0e}".replace("e-0", "e-")


def steps() -> str:
    lines = [
        [
            _rate(r["rate"]),
            str(r["steps"]),
            f"{r['none']:.2f}",
            f"{r['of step 0']:.2f}",
            f"{r['of these weights']:.2f}",
            f"{r['tokens as at step 0']:.0%}",
        ]
        for r in load("history_steps")["rows"]
        if r["steps"] or r["rate"] == 1e-6
    ]
    head = [
        "learning rate",
        "optimiser steps",
        "tau without",
        "history of step 0",
        "of these weights",
        "live tokens as at step 0",
    ]
    return markdown(head, fold(lines))


def ends() -> str:
    calls, lines = load("history_ends")["calls"], []
    for label, name in ENDS.items():
        rows = calls[name]["rows"]
        others = (only(rows, rule=rule)["to position"] for rule in ("none", "expected", "true"))
        first = only(rows, rule="position")["steps"]
        lines.append([label, f"{first:,}", *map(change, others)])
    head = ["", "in use: by position", "none preferred", "by expected length", "by true length"]
    return markdown(head, lines)


def grpo() -> str:
    rows = load("grpo_history")["rows"]
    lines = []
    for rate, past in dict.fromkeys((r["learning_rate"], r["history"]) for r in rows):
        cells = (only(rows, learning_rate=rate, history=past, epoch=n) for n in (1, 2, 3))
        shown = (f"{r['tau']:.2f} / {r['rollout_seconds']:.1f}" for r in cells)
        lines.append([_rate(rate), str(past), *shown])
    return markdown(["learning rate", "history", "epoch 1", "2", "3"], lines)


TABLES = {
    "tau": tau,
    "kinds": kinds,
    "ablations": ablations,
    "prior": prior,
    "prior_live": prior_live,
    "votes": votes,
    "steps": steps,
    "ends": ends,
    "grpo": grpo,
}
