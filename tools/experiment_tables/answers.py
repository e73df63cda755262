"""Tables of answers.md."""

from bench.e2e.long.readme_table import all_rows
from bench.lib.common import markdown
from bench.lib.settings import words
from tools.experiment_tables.results import between, fold, load

TASKS = {"words": "word problems", "code": "code"}
CONSTRAINTS = {
    "unused": "none, over the checkout before",
    "none": "none",
    "table": "`logit_bias`, `suppress_tokens`",
    "ngram": "`no_repeat_ngram_size`",
    "counts": "frequency and presence penalty",
    "function": "`logits_processor` that changes nothing",
    "json": "`json_schema`",
}


def short() -> str:
    result = load("cpu")
    head = [
        f"task ({words(result.get('settings'))})",
        "samples",
        "csd",
        "the same engine, no drafts",
        "`transformers` generate",
        "llama.cpp",
        "csd / no drafts",
        "csd / `transformers`",
        "csd / llama.cpp",
        "tokens per step",
    ]
    lines = [
        [
            TASKS[r["task"]],
            str(r["samples"]),
            *(
                f"{r[f'{side} tok/s']:.0f}"
                for side in ("csd", "plain", "transformers", "llama.cpp")
            ),
            between(r["csd/plain"], (r["low"], r["high"])),
            *(f"{r[f'csd/{side}']:.2f}" for side in ("transformers", "llama.cpp")),
            f"{r['tau']:.2f}",
        ]
        for r in result["rows"]
    ]
    return markdown(head, fold(lines))


def constraints() -> str:
    def price(x: float) -> str:
        return "1" if x == 1 else f"{x:.2f}"

    lines = [
        [
            CONSTRAINTS[r["constraint"]],
            price(r["price, plain"]),
            price(r["price, auto"]),
            f"{r['tau']:.2f}" if "tau" in r else "",
        ]
        for r in load("constraints")["rows"]
    ]
    return markdown(["constraint", "plain steps", "with drafts", "tau"], lines)


TABLES = {"long": lambda: all_rows(load("long")), "short": short, "constraints": constraints}
