"""Tables of drafting.md, but for those of replays."""

from bench.lib.common import markdown
from tools.experiment_tables.results import CLASSEVAL, GSM8K, MATH, OWN, change, load, only

ABLATIONS = {
    "16 successors a context: 8": "successors=8",
    "orders 1, 2, 3, 5, 8, 12, 16: 1 to 3": "orders=(1, 2, 3)",
    "orders 1, 2, 3, 5, 8": "orders=(1, 2, 3, 5, 8)",
    "orders 1, 2, 4, 8, 16": "orders=(1, 2, 4, 8, 16)",
    "discount a level 0.8: none": "decay=1.0",
    "0.7": "decay=0.7",
    "one level cost for all samples": "settle=0",
    "nodes for samples that are ahead as for others": "lead=0",
    "a sample's own successors 4 times: once": "own_weight=1.0",
    "8 times": "own_weight=8.0",
    "trust in a context at most 0.7: 0.5": "trust=0.5",
    "0.99": "trust=0.99",
    "weight of the unseen 0.7: 0.35": "smoothing=22937",
    "1.4": "smoothing=91750",
    "drawn token beside its distribution 0.5: 0": "hard_weight=0",
    "1": "hard_weight=65536",
    "prompt's tokens 1: 0.25": "prompt_weight=16384",
    "0.5": "prompt_weight=32768",
    "beta 0.4: 0.3": "beta=0.3",
    "beta 0.5": "beta=0.5",
    "beta an order 0.15: 0.1": "beta_order=0.1",
    "0.2": "beta_order=0.2",
    "uncoupled share of a context 0.2: none": "uncoupled=0.0",
    "0.1": "uncoupled=0.1",
    "0.3": "uncoupled=0.3",
    "nodes expanded a level 8: 4": "frontier=4",
    "16": "frontier=16",
}
RULES = (
    "survivors get the nodes of samples that ended",
    "the same, and samples that are behind get more",
    "samples whose drafts fail get fewer",
    "half of the samples run ahead",
    "a quarter at a time",
)
TRUST = {
    "learned by the samples of a prompt": "learned",
    "fitted to the other files, fixed": "other files",
    "the same, and learned from there": "learned from these",
    "fitted to the very problems, fixed": "the same file",
}
COSTS = {
    "consensus, propose": ("consensus", "propose_us"),
    "consensus, insert": ("consensus", "insert_us"),
    "suffix tree (arctic-inference 0.3.0), draft": ("suffix-tree", "propose_us"),
    "the same, extend": ("suffix-tree", "insert_us"),
    "the paper's to the letter, on the host, draft": ("paper", "propose_us"),
    "the paper's with k shrinking, on the host, draft": ("paper-shrinking", "propose_us"),
    "prompt lookup, draft": ("prompt-lookup", "propose_us"),
    "REST, draft": ("rest", "propose_us"),
}


def _changes(name: str, labels: dict[str, str], traces: dict[str, str]) -> str:
    """A first row of tau, then each change's ratio of tau."""
    rows = load(name)["rows"]
    first = only(rows, change="as it is")
    lines = [["as it is, tau", *(f"{first['tau'][trace]:.3f}" for trace in traces.values())]]
    for label, field in labels.items():
        row = only(rows, change=field)
        lines.append([label, *(change(row["ratio"][trace]) for trace in traces.values())])
    return markdown(["change", *traces], lines)


def ablations() -> str:
    traces = {"own prompts, N = 16": OWN, "GSM8K, N = 16": GSM8K, "MATH, N = 8": MATH}
    return _changes("ablations", ABLATIONS, traces)


def ablations_copying() -> str:
    labels = {
        "one level cost for all samples": "settle=0",
        "and no context beyond 8 tokens": "orders=(1, 2, 3, 5, 8), settle=0",
    }
    traces = {"rewrite": "rewrite", "ClassEval": CLASSEVAL, "GSM8K": GSM8K, "MATH": MATH}
    return _changes("ablations_copying", labels, traces)


def queue() -> str:
    rows, lines = load("queue")["rows"], []
    names = {
        MATH: "Qwen2.5-Math, MATH, 50 prompts",
        CLASSEVAL: "GPT-4, ClassEval, 60 prompts",
        GSM8K: "SmolLM2, GSM8K, 20 prompts",
    }
    for trace, name in names.items():
        samples = rows[trace][0]["together"]
        for row in rows[trace]:
            label = str(row["together"])
            if row["together"] == samples:
                label = f"{name}: all {samples}"
            elif row["together"] == 1:
                label += ", the default"
            lines.append(
                [
                    label,
                    f"{row['tau']:.2f}",
                    f"{row['steps']:,}",
                    f"{row['steps'] * row['samples a step']:,.0f}",
                    f"{row['prompts a step']:.1f}",
                ]
            )
    head = ["samples of a prompt together", "tau", "steps", "sample-steps", "prompts in flight"]
    return markdown(head, lines)


def allocation() -> str:
    records = load("allocation")
    traces = {"own prompts, N = 16": OWN, "GSM8K, N = 16": GSM8K, "MATH, N = 8": MATH}
    lines = [
        [rule, *(f"{only(records[t]['rules'], rule=rule)['ratio']:.2f}" for t in traces.values())]
        for rule in RULES
    ]
    return markdown(["rule", *traces], lines)


def trust() -> str:
    rows = load("trust")["rows"]
    traces = {
        "own prompts": OWN,
        "rewrite": "rewrite",
        "ClassEval": CLASSEVAL,
        "GSM8K": GSM8K,
        "MATH": MATH,
    }
    lines = [
        [label, *(change(only(rows, trace=t)["ratio"][field]) for t in traces.values())]
        for label, field in TRUST.items()
    ]
    return markdown(["", *traces], lines)


def _ms(us: float) -> str:
    ms = us / 1000
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if round(ms, 2) >= 1 else f"{ms:.2f}"


def drafter_cost() -> str:
    rows, sizes, lengths = load("drafter_cost")["rows"], (4, 16, 64, 256), (512, 2048, 8192)

    def cell(drafter: str, field: str, N: int, shown) -> str:
        records = [r for r in rows if (r["drafter"], r["N"]) == (drafter, N)]
        if not records:
            return "not run"
        return " / ".join(shown(only(records, history=n)[field]) for n in lengths)

    lines = [[label, *(cell(*fields, N, _ms) for N in sizes)] for label, fields in COSTS.items()]
    last = "consensus, insert, us a committed token"
    cells = (cell("consensus", "insert_us_a_token", N, lambda x: f"{x:.0f}") for N in sizes)
    return markdown(["", "N = 4", "16", "64", "256"], [*lines, [last, *cells]])


TABLES = {
    "ablations": ablations,
    "ablations_copying": ablations_copying,
    "queue": queue,
    "allocation": allocation,
    "trust": trust,
    "drafter_cost": drafter_cost,
}
