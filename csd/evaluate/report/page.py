"""Self-contained HTML page of a run: figures, charts and a small script in one file."""

import html
import json
from importlib.resources import files
from pathlib import PurePath
from string import Template
from typing import Any

from csd.engine.results.result import Samples, to_json
from csd.engine.results.stats import sampling_seconds
from csd.evaluate.report import data

# log-probability of a token without probability, in place of null
NEVER = -9999.0
# in the order in which the page runs them
SCRIPTS = ("charts.js", "graph.js", "scroll.js", "report.js")


def page(result: dict) -> str:
    """HTML of a run.

    result: the object that `csd sample --json` prints; with `--drafts` the page also shows the
        graph. Raises ValueError for anything else.
    """
    data.check(result)
    decision = data.decision(result)
    stats = result["stats"]
    run = {
        "samples": _samples(result, decision),
        "pieces": result["pieces"],
        "prompt_ids": result["prompt_ids"],
        "tokens": result["tokens"],
        "drafts": result.get("drafts"),
        "figures": {
            "votes": data.votes(decision),
            "steps": data.steps(result),
            "divergence": data.shared_runs(result),
        },
    }
    facts = {
        "model": PurePath(result.get("model", "")).name,
        "tokens": f"{stats['tokens']:,}",
        "steps": f"{stats['steps']:,}",
        "seed": result["seed"],
        "vote": str(decision),
    }
    if decision.thoughts_cut:
        facts["thoughts cut"] = f"{decision.thoughts_cut} of {len(decision.answers)}"
    prompt = result.get("prompt") or "".join(data.pieces(result, result["prompt_ids"]))
    here = files("csd.evaluate.report")
    return Template((here / "page.html").read_text("utf-8")).substitute(
        headline=_headline(result),
        lead=_lead(stats),
        shares=_shares(stats),
        legend=_legend(stats),
        facts=facts_list(facts),
        prompt=html.escape(prompt),
        # fold a long prompt, which would push the samples off the first screen
        open=" open" if len(prompt) < 600 else "",
        style=(here / "report.css").read_text("utf-8"),
        # escaped, so that no text of a model can close the script element
        run=json.dumps(run).replace("<", "\\u003c"),
        scripts="\n".join(
            f"<script>{(here / name).read_text('utf-8')}</script>" for name in SCRIPTS
        ),
    )


def facts_list(facts: dict[str, Any]) -> str:
    """HTML of names and values."""
    texts = ((html.escape(name), html.escape(str(value))) for name, value in facts.items())
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in texts)


def page_of(out: Samples) -> str:
    """HTML of a `csd.generate` result, which must have its tokenizer."""
    name = getattr(out.tokenizer, "name_or_path", None) or ""
    result = to_json(out, out.tokenizer, name, drafts=any(sample.drafts for sample in out))
    # through JSON, so that token ids become str keys, as in a file
    return page(json.loads(json.dumps(result)))


def _headline(result: dict) -> str:
    count, stats = len(result["tokens"]), result["stats"]
    samples = "1 sample" if count == 1 else f"{count} samples of one prompt"
    seconds = sampling_seconds(stats.get("seconds", {}))
    speed = (
        f", {stats['tokens'] / seconds:.0f} tokens per second, {seconds:.1f} s" if seconds else ""
    )
    if not stats["nodes_accepted"]:
        # one token per step is no result of drafts
        return f"{samples}: {stats['tokens']:,} tokens{speed}"
    return f"{samples}: {stats['tokens_per_step']:.2f} tokens per step of a sample{speed}"


def _lead(stats: dict) -> str:
    """Sentences on what was drafted, and on the rows that equal texts shared, if any."""
    lead = "Nothing was drafted: plain sampling, one token per sample and step."
    if stats["nodes_proposed"]:
        lead = (
            "csd drafts tokens of each sample from the other samples of the prompt, and accepts a "
            "draft only where it equals the model's own sample, so the texts are those of plain "
            f"sampling. {stats['nodes_accepted']:,} of {stats['nodes_proposed']:,} drafted tokens "
            f"were accepted, so {stats['tokens']:,} tokens took {stats['sample_steps']:,} passes "
            f"of a sample through the model instead of {stats['tokens']:,}."
        )
    rows, alone = stats.get("rows", 0), stats["sample_steps"] + stats["nodes_proposed"]
    if 0 < rows < alone:
        lead += (
            " Samples with equal text share rows of the model: it computed "
            f"{rows:,} rows in place of {alone:,}."
        )
    return lead


def _counts(stats: dict) -> dict[str, int]:
    """Number of tokens by source, without sources that have none."""
    counts = {"sampled": stats["tokens"] - stats["nodes_accepted"], **stats["accepted"]}
    return {source: counts[source] for source in data.SOURCES if counts.get(source)}


def _shares(stats: dict) -> str:
    """HTML of a bar whose parts are proportional to the tokens of each source."""
    return "".join(
        f'<span style="background:var(--{source});flex:{count} 1 0"></span>'
        for source, count in _counts(stats).items()
    )


def _legend(stats: dict) -> str:
    return "".join(
        f'<li><i style="background:var(--{source})"></i>{data.SOURCES[source]} '
        f"{count / stats['tokens']:.0%}</li>"
        for source, count in _counts(stats).items()
    )


def _samples(result: dict, decision: data.Decision) -> list[dict]:
    answers = dict(enumerate(decision.answers))
    won = None if decision.tied else decision.answer
    alone = data.alone_from(result["tokens"])
    return [
        {
            "finish": result["finish_reasons"][i],
            "answer": answers.get(i),
            "voted": won is not None and answers.get(i) == won,
            "alone": alone[i],
            "steps": result["steps"][i],
            "sources": [s or "sampled" for s in result["sources"][i]],
            "characters": data.characters(result, i),
            "logprobs": [round(NEVER if p is None else p, 4) for p in result["logprobs"][i]],
        }
        for i in range(len(result["tokens"]))
    ]
