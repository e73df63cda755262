"""Tables from a result file: the headline row's, and that of all rows."""

from statistics import median

from bench.e2e.long.plan import CSD, LLAMA, TRANSFORMERS, VLLM
from bench.lib.common import markdown
from bench.lib.settings import words

SAMPLES = 8
BEGIN, END = "<!-- python -m bench answers -->", "<!-- /bench answers -->"
# engines of the table and their sides; the fastest side represents the engine
ENGINES = {
    "csd": CSD[:1],
    "csd without drafts": CSD[1:],
    "vLLM": VLLM,
    "llama.cpp": LLAMA,
    "transformers": TRANSFORMERS,
}


def headline(result: dict) -> dict:
    """Headline row at 8 samples: most engines first, then one that counts, then the longest."""
    rows = [r for r in result["rows"] if r["kind"] == "one" and r["samples"] == SAMPLES]
    if not rows:
        raise ValueError(f"the result has no row of {SAMPLES} samples of one prompt")
    return max(rows, key=lambda r: (len(fastest(r)), r["counts"], r["limit"]))


def fastest(row: dict) -> dict[str, str]:
    """Returns the fastest side of each engine that has one in the row."""
    side_of = {}
    for engine, sides in ENGINES.items():
        speeds = {side: row["tok/s"][side] for side in sides if side in row["tok/s"]}
        if speeds:
            side_of[engine] = max(speeds, key=speeds.__getitem__)
    return side_of


def block(*results: dict) -> str:
    """Returns the page's block with its markers: a table with a column for each result."""
    rows = [headline(result) for result in results]
    cells = [
        {engine: _cell(row, engine, side, seconds) for engine, side, seconds in by_seconds(row)}
        for row in rows
    ]
    names = list(dict.fromkeys(name for column in cells for name in column))
    lines = [[name, *(column.get(name, "") for column in cells)] for name in names]
    head = [f"seconds for {SAMPLES} answers", *map(_title_of, results)]
    notes = " ".join(line for result in results for line in _factors(result))
    return "\n\n".join([BEGIN, markdown(head, lines), *filter(None, [notes]), _text(results), END])


def _title_of(result: dict) -> str:
    """The model, the length of its answers and its settings."""
    row = headline(result)
    return f"{_model(result)}: {row['mean length']:,.0f} tokens, {words(result.get('settings'))}"


def _model(result: dict) -> str:
    return result["model"].removesuffix(".gguf")


def _cell(row: dict, engine: str, side: str, seconds: float) -> str:
    """Seconds, and for other engines how many times csd's, with the range of the pairs."""
    if engine == "csd":
        return f"**{seconds:.1f}**"
    return f"{seconds:.1f}: {_times(row, side)}"


def by_seconds(row: dict) -> list[tuple[str, str, float]]:
    """Engine, its fastest side and its seconds for the row's answers, the fastest engine first.

    All engines are timed per token, so their seconds are of answers of one length, csd's.
    """
    tokens = SAMPLES * row["mean length"]
    entries = [(name, side, tokens / row["tok/s"][side]) for name, side in fastest(row).items()]
    return sorted(entries, key=lambda x: x[2])


def job(result: dict) -> str:
    """The answers of the row, in words."""
    row = headline(result)
    return f"{row['samples']} answers of {row['mean length']:,.0f} tokens"


def place(result: dict) -> str:
    """The model, the dtype and the machine."""
    return f"{_model(result)} in {_here(result)}"


def _here(result: dict) -> str:
    here = result["machine"]
    own = ", csd and llama.cpp in the file's own numbers," if result.get("packed") else ""
    return f"{result['dtype']}{own} on {here['cores']} cores of {here['cpu']}"


def _times(row: dict, slow: str, fast: str = "csd") -> str:
    """Median of the pairs' ratios of `fast`'s speed to `slow`'s, with their range."""
    ratios = [a / b for a, b in zip(row["rates"][fast], row["rates"][slow], strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _factors(result: dict) -> list[str]:
    """The gain over the fastest other engine, that without drafts, and that by drafts."""
    row = headline(result)
    plain, peers = CSD[1], [x for x in by_seconds(row) if x[0] not in CSD]
    if not peers:
        return []
    engine, side, _ = peers[0]
    return [
        f"{_model(result)}: {_times(row, side)} times as fast as {_named(engine, side)}; csd "
        f"without drafts is **{_times(row, side, plain)}** times as fast as it, and drafts make "
        f"csd **{_times(row, plain)}** times as fast."
    ]


def _named(engine: str, side: str) -> str:
    return engine if side == engine else f"{engine} ({side.removeprefix(engine).strip(' ,')})"


def _ratio(interval: list[float] | None) -> str:
    if interval is None:
        return ""
    return "{:.2f} ({:.2f} to {:.2f})".format(*interval)


def _text(results: tuple[dict, ...]) -> str:
    rows = [headline(result) for result in results]
    task, limit = rows[0]["task"], rows[0]["limit"]
    places = list(dict.fromkeys(map(_here, results)))
    # in the order of the columns
    pairs = dict.fromkeys(len(row["rates"]["csd"]) for row in rows)
    ended = dict.fromkeys(f"{row['ended']:.0%}" for row in rows)
    engines = [fastest(row) for row in rows]
    quantised = any(LLAMA[0] in sides.values() for sides in engines)
    unpacked = not all(result.get("packed") for result in results)
    of_llama = ""
    if quantised and unpacked:
        of_llama = f", {LLAMA[0]} in the file's own quantisation"
    empty = any(sides.keys() != engines[0].keys() for sides in engines)
    return (
        f"{task.capitalize()}, at most {limit:,} tokens, in {' and '.join(places)}{of_llama}. "
        "Several configurations of each engine were timed, in turn with the other engines; the "
        "table has the fastest of each. Seconds are medians of "
        f"{' and '.join(map(str, pairs))} pairs of runs; behind them is how many times as fast csd "
        "is, the median of the pairs' ratios (their range), which need not be the ratio of the "
        f"medians. {'An empty cell was not run. ' if empty else ''}"
        f"Of csd's answers {' and '.join(ended)} ended before the limit of tokens."
        f"{''.join(_absent(result, row) for result, row in zip(results, rows, strict=True))}"
    )


def _absent(result: dict, row: dict) -> str:
    missing = result["left out"]
    engines = [name for name in ENGINES if ENGINES[name][0] in missing and name not in fastest(row)]
    reasons = {name: missing[ENGINES[name][0]] for name in engines}
    # sides left out by the command have empty cells, without a sentence
    return "".join(
        f" {_model(result)}: {name} is left out: {why}."
        for name, why in reasons.items()
        if not why.startswith("--without")
    )


def all_rows(result: dict) -> str:
    """Table of all rows: csd's tokens per second, and its ratio to each engine's fastest side."""
    engines = [name for name in ENGINES if name != "csd"]
    head = [
        f"row ({words(result.get('settings'))})",
        "mean tokens",
        "ended",
        "distinct 8-grams",
        "tau",
        "csd, tokens per second",
        *(f"/ {name}" for name in engines),
    ]
    lines = []
    for row in result["rows"]:
        sides = fastest(row)
        ratios = [_ratio(row["csd / other"].get(sides.get(name, ""))) for name in engines]
        lines.append(
            [
                _title(row),
                f"{row['mean length']:,.0f}",
                f"{row['ended']:.0%}",
                f"{row['distinct 8-grams']:.2f}{'' if row['counts'] else ' *'}",
                f"{row['tau']:.2f}",
                f"{row['tok/s']['csd']:,.0f}",
                *ratios,
            ]
        )
    return markdown(head, lines)


def _title(row: dict) -> str:
    many = f"{row['prompts']} prompts in {row['slots']} slots, " if row["kind"] == "many" else ""
    return f"{many}{row['task']}, N={row['samples']}, at most {row['limit']:,}"
