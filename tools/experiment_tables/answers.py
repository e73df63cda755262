"""Tables of answers.md."""

from bench.e2e.long.tables import all_rows
from bench.lib.common import markdown
from bench.lib.settings import words
from tools.experiment_tables.results import between, fold, load

TASKS = {"words": "word problems", "code": "code"}
CONSTRAINTS = {
    "none": "none",
    "filters": "`top_k=20`, `top_p=0.8`, `repetition_penalty=1.05`",
    "typical": "`typical_p`",
    "bias": "`logit_bias`, `suppress_tokens`",
    "allowed": "`allowed_token_ids`",
    "bias and filters": "`logit_bias` and the filters above",
    "words": "`bad_words` of several tokens",
    "ngram": "`no_repeat_ngram_size`",
    "counts": "frequency and presence penalty",
    "min tokens": "`min_new_tokens`",
    "stop": "`stop` strings",
    "top_logprobs": "`top_logprobs=20`",
    "thought": "`max_thinking_tokens`",
    "processor": "a processor of `transformers`",
    "function": "`logits_processor` that changes nothing",
    "regex": "`regex`",
    "json": "`json_schema`",
}

FLAT = {
    "none": "none",
    "top_k": "`top_k=50`",
    "top_p": "`top_p=0.95`",
    "min_p": "`min_p=0.05`",
    "typical": "`typical_p=0.9`",
    "penalty": "`repetition_penalty=1.1`",
    "counts": "`frequency_penalty=0.3`",
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
    rows = {(r["option"], r["vocabulary"]): r for r in load("constraints")["rows"]}
    vocabularies = sorted({vocabulary for _, vocabulary in rows})
    head = ["option", *(f"{v:,}, N={n}" for v in vocabularies for n in (1, 8))]
    lines = []
    for option, text in CONSTRAINTS.items():
        line = [text]
        for vocabulary in vocabularies:
            row = rows.get((option, vocabulary))
            for n in (1, 8):
                if row is None:
                    line.append("")
                elif option == "none":
                    line.append(f"{row[f'ms, {n}']:.1f} ms")
                else:
                    line.append(f"{100 * row[f'share, {n}']:+.0f}%")
        lines.append(line)
    return markdown(head, lines)


def flat() -> str:
    """Milliseconds of a step's verification at temperatures from 1."""
    rows = {
        (r["option"], r["vocabulary"], r["temperature"]): r
        for r in load("constraints_flat")["rows"]
    }
    columns = sorted({key[1:] for key in rows})
    head = ["option", *(f"{vocabulary:,}, T = {heat:g}" for vocabulary, heat in columns)]
    lines = [
        [text, *(f"{rows[option, *column]['ms']:.1f}" for column in columns)]
        for option, text in FLAT.items()
    ]
    return markdown(head, lines)


def settings() -> str:
    """A model's own settings against its temperature alone, and csd against vLLM with them."""
    head = ["model, its own settings", "samples", "side", "own, tokens per second", "plain"]
    lines = []
    for name in ("settings_coder-1.5b", "settings_vllm", "settings_demo"):
        result = load(name)
        for row in result["rows"]:
            rates = (f"{row[f'{of} tok/s']:.3g}" for of in ("own", "plain"))
            ratio = between(row["own / plain"], (row["low"], row["high"]))
            ends = (row.get(f"csd / it, {end}") for end in ("low", "high"))
            over = between(row["csd / it"], [*ends]) if "csd / it" in row else ""
            model = f"{result['model'].removesuffix('.gguf')}, {words(result['own'])}"
            lines.append([model, str(row["samples"]), row["side"], *rates, ratio, over])
    return markdown([*head, "own / plain", "csd / it"], fold(lines))


TABLES = {
    "long": lambda: all_rows(load("long")),
    "short": short,
    "constraints": constraints,
    "flat": flat,
    "settings": settings,
}
