"""Tables of docs/verifiers.md, and the plot, from a result of `verify.py`."""

from itertools import pairwise

from bench.lib.common import interval, markdown

DRAFTS = (2, 4, 8)
# schemes that the paper orders by acceptance, the highest first
ORDER = ("bound", "canonical", "kseq", "recursive")
FLAT = "flat, 60 tokens"
NAMES = {
    "bound": "bound, independent draws",
    "canonical, whole": "canonical, whole",
    "canonical": "canonical, s = 5",
    "kseq": "K-SEQ",
    "recursive": "recursive",
    "single": "single",
    "bound, no replacement": "bound, draws without replacement",
    "no replacement": "recursive, without replacement",
    "match, drawn": "match, draws",
    "match, fixed": "match, fixed top K",
    "match, coupled": "match, coupled by the engine",
}


def tables(result: dict) -> list[str]:
    """Markdown tables, in the order of docs/verifiers.md, without parts that were not measured."""
    out = []
    if "acceptance" in result:
        out += [_acceptance(result["acceptance"]), _order(result["acceptance"])]
    if "trees" in result:
        out.append(_trees(result["trees"]))
    if "time" in result:
        out.append(_times(result["time"]))
    if {"acceptance", "trees", "time"} <= set(result):
        out.insert(0, _choice(result))
    return out


def _three(row: dict, unit: str = "") -> list[float]:
    return [row[f"K={k}{unit}"] for k in DRAFTS]


def _share(x: float) -> str:
    """Three digits after the point, without the leading zero."""
    return f"{x:.3f}".removeprefix("0")


def _ms(x: float) -> str:
    return f"{x:.0f}" if x >= 10 else f"{x:.2g}"


def _by_name(rows: list[dict]) -> dict[tuple[str, str], list[float]]:
    return {(r["pairs"], r["scheme"]): _three(r) for r in rows}


def _acceptance(rows: list[dict]) -> str:
    by_name, kinds = _by_name(rows), list(dict.fromkeys(r["pairs"] for r in rows))
    body = []
    for scheme, name in NAMES.items():
        cells = [by_name.get((kind, scheme)) for kind in kinds]
        body.append([name, *(" / ".join(map(_share, c)) if c else "" for c in cells)])
    return markdown(["K = 2 / 4 / 8", *kinds], body)


def _order(rows: list[dict]) -> str:
    """Table of the share of pairs that violate ORDER; marks means that do so too."""
    by_name, kinds = _by_name(rows), list(dict.fromkeys(r["pairs"] for r in rows))
    body = []
    for better, worse in pairwise(ORDER):
        cells = []
        for kind in kinds:
            shares = " / ".join(f"{x:.1%}" for x in by_name[kind, f"share {better} < {worse}"])
            means = zip(by_name[kind, better], by_name[kind, worse], strict=True)
            cells.append(shares + (", mean too" if any(a < b for a, b in means) else ""))
        body.append([f"{NAMES[better]} < {NAMES[worse]}", *cells])
    return markdown(["share of pairs, K = 2 / 4 / 8", *kinds], body)


def tau(row: dict, pick=None) -> float:
    pick = range(len(row["steps"])) if pick is None else pick
    return sum(row["tokens"][i] for i in pick) / sum(row["steps"][i] for i in pick)


def _trees(rows: list[dict]) -> str:
    """Table of tau, and its ratio to match's on the same problems, with its 95% interval."""
    settings = list(dict.fromkeys(r["setting"] for r in rows))
    by_name = {(r["setting"], r["verifier"], r["draws"]): r for r in rows}
    body = []
    for verifier, draws in dict.fromkeys((r["verifier"], r["draws"]) for r in rows):
        cells = []
        for setting in settings:
            row, match = by_name.get((setting, verifier, draws)), by_name[setting, "match", 0]
            if row is None:
                cells.append("")
            elif row is match:
                cells.append(f"{tau(row):.2f}")
            else:
                ratio = lambda pick=None, a=row, b=match: tau(a, pick) / tau(b, pick)  # noqa: E731
                low, high = interval(ratio, len(row["steps"]))
                cells.append(f"{tau(row):.2f}, {ratio():.2f} ({low:.2f} to {high:.2f})")
        body.append([verifier, str(draws or "-"), *cells])
    return markdown(["tau, and its ratio to match's", "draws a node", *settings], body)


def _times(rows: list[dict]) -> str:
    sizes = list(dict.fromkeys(r["vocabulary"] for r in rows))
    by_name = {(r["vocabulary"], r["scheme"]): _three(r, " ms") for r in rows}
    body = [
        [scheme, *(" / ".join(map(_ms, by_name[size, scheme])) for size in sizes)]
        for scheme in dict.fromkeys(r["scheme"] for r in rows)
    ]
    return markdown(["ms, K = 2 / 4 / 8", *(f"{size:,} tokens" for size in sizes)], body)


def _choice(result: dict) -> str:
    """Text that advises on the choice of a verifier, at T = 0.7 unless stated otherwise."""
    by_name = _by_name(result["acceptance"])
    at = {s: by_name["T=0.7", s] for s in NAMES}
    far = {s: by_name[FLAT, s] for s in NAMES if (FLAT, s) in by_name}
    few = {r["scheme"]: _three(r, " ms") for r in result["time"] if r["vocabulary"] == 9}
    taus = {
        r["verifier"]: tau(r)
        for r in result["trees"]
        if r["setting"] == "T=0.7" and r["draws"] in (0, 2)
    }

    def spread(values: list[float], others: list[float]) -> str:
        gaps = sorted(_share(a - b) for a, b in zip(values, others, strict=True))
        return f"{gaps[0]} to {gaps[-1]}"

    four = DRAFTS.index(4)
    drawn = ", ".join(f"{taus[v]:.2f}" for v in ("canonical", "kseq", "recursive"))
    rows = [
        [
            "csd's own drafts",
            "`match`",
            f"tau {taus['match']:.2f}; canonical, K-SEQ and recursive on draws: {drawn}. "
            "Tokens stay those of plain sampling",
        ],
        [
            "independent draws of your own, up to two a token",
            "`Canonical()`",
            "the bound itself with `tokens=None`, "
            f"{spread(at['canonical'], at['kseq'])} above K-SEQ",
        ],
        [
            "more draws",
            "`Canonical()` or `KSeq()`",
            f"at K = 4 {_share(at['canonical'][four])} in {_ms(few['canonical'][four])} ms, or "
            f"{_share(at['kseq'][four])} in {_ms(few['kseq'][four])} ms (16 rows of 9 tokens)",
        ],
        [
            "the same, but flat targets",
            "`KSeq()`, or `Canonical(tokens=None)`",
            f"at K = 4 {_share(far['kseq'][four])} and {_share(far['canonical, whole'][four])}; "
            f"`Canonical()` {_share(far['canonical'][four])}",
        ],
        [
            "draws that need not be independent",
            "`Recursive(replacement=False)`",
            f"at K = 4 {_share(at['no replacement'][four])}, above the bound of independent draws, "
            f"{_share(at['bound'][four])}",
        ],
        [
            "little time a decision",
            "`Recursive()`",
            f"{_ms(few['recursive'][four])} ms at K = 4, "
            f"{spread(at['canonical'], at['recursive'])} below canonical",
        ],
    ]
    return markdown(["you have", "use", "because"], rows)


def plot(rows: list[dict], path: str) -> None:
    """Plot acceptance over K, one panel per kind of pairs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # makes the file reproducible
    matplotlib.rcParams["svg.hashsalt"] = "csd"
    shown = ("bound", "canonical", "kseq", "recursive", "match, coupled", "match, fixed", "single")
    by_name, names = _by_name(rows), list(dict.fromkeys(r["pairs"] for r in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(3 * len(names), 3.2), sharey=False)
    for name, axis in zip(names, axes, strict=True):
        for scheme in shown:
            if (name, scheme) in by_name and not (name == FLAT and scheme.startswith("match")):
                style = "k--" if scheme == "bound" else "o-"
                values = by_name[name, scheme]
                axis.plot(DRAFTS, values, style, label=scheme, markersize=3, linewidth=1)
        axis.set_title(name, fontsize=9)
        axis.set_xticks(DRAFTS)
        axis.set_xlabel("drafts K")
    axes[0].set_ylabel("acceptance")
    axes[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
