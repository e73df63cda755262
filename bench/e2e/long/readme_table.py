"""Tables from a result file: README's with five rows, and the documentation's with all."""

from bench.e2e.long.plan import CSD, LLAMA, TRANSFORMERS, VLLM
from bench.lib.common import markdown

SAMPLES = 8
BEGIN, END = "<!-- bench.long: python -m bench.long --plot -->", "<!-- /bench.long -->"
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
    found = {}
    for engine, sides in ENGINES.items():
        speeds = {side: row["tok/s"][side] for side in sides if side in row["tok/s"]}
        if speeds:
            found[engine] = max(speeds, key=speeds.__getitem__)
    return found


def block(result: dict) -> str:
    """Returns README's block with its markers."""
    row = headline(result)
    sides, length = fastest(row), row["mean length"]
    job = f"{SAMPLES} answers of {length:,.0f} tokens"
    lines = []
    for engine in ENGINES:
        side = sides.get(engine)
        if side is None:
            why = result["left out"].get(ENGINES[engine][0], "no such side in this row")
            lines.append([engine, why, "", ""])
            continue
        speed = row["tok/s"][side]
        lines.append(
            [
                _named(engine, side),
                f"{speed:,.0f}",
                f"{SAMPLES * length / speed:.1f} s",
                _ratio(row["csd / other"].get(side)),
            ]
        )
    head = ["engine", "tokens per second", job, "csd against it, median of pairs"]
    return "\n".join([BEGIN, "", markdown(head, lines), "", *_text(result, row), END])


def _named(engine: str, side: str) -> str:
    return engine if side == engine else f"{engine} ({side.removeprefix(engine).strip(' ,')})"


def _ratio(found: list[float] | None) -> str:
    if found is None:
        return ""
    return "{:.2f} ({:.2f} to {:.2f})".format(*found)


def _text(result: dict, row: dict) -> list[str]:
    here, pairs = result["machine"], len(row["rates"]["csd"])
    return [
        f"{result['model']} in {result['dtype']} on {here['cores']} cores of {here['cpu']}: "
        f"{row['task']}, at most {row['limit']:,} tokens, temperature 0.7. Each engine runs in its "
        f"fastest configuration, in turn with the others: rates are medians of {pairs} draws, and "
        f"ratios medians of the {pairs} pairs with their range. {row['ended']:.0%} of the answers "
        f"ended before the limit, and {row['distinct 8-grams']:.0%} of their 8-grams are distinct"
        f"{'' if row['counts'] else ', so that the text is no measure of other text'}."
    ]


def all_rows(result: dict) -> str:
    """Table of all rows: csd's tokens per second, and its ratio to each engine's fastest side."""
    engines = [name for name in ENGINES if name != "csd"]
    head = [
        "row",
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
