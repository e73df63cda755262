"""Self-contained page: figures, plotly.js and a small script in one file."""

import html
import json
from importlib.resources import files
from pathlib import PurePath
from string import Template

from csd.evaluate.report import data, figures


def page(result: dict) -> str:
    """The HTML of a run.

    result: the object that `csd sample --json` prints; with `--drafts` the page also shows the
        graph. Raises ValueError for anything else, ImportError without plotly.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("a report needs plotly: pip install csd[report]") from error
    data.check(result)
    decision = data.decision(result)
    stats = result["stats"]
    run = {
        "samples": _samples(result, decision),
        "pieces": result["pieces"],
        "prompt_ids": result["prompt_ids"],
        "tokens": result["tokens"],
        "drafts": result.get("drafts"),
        "colours": figures.COLOURS,
        "figures": {
            "votes": figures.votes(decision),
            "steps": figures.steps(result),
            "divergence": figures.divergence(result),
        },
    }
    facts = {
        "model": PurePath(result.get("model", "")).name,
        "tokens": f"{stats['tokens']:,}",
        "steps": f"{stats['steps']:,}",
        "seed": result["seed"],
        "vote": "none" if decision.answer is None else
        f"{decision.answer} ({decision.count} of {len(decision.answers)})",
    }  # fmt: skip
    if decision.cut:
        facts["thoughts cut"] = f"{decision.cut} of {len(decision.answers)}"
    prompt = result.get("prompt") or "".join(data.pieces(result, result["prompt_ids"]))
    here = files("csd.evaluate.report")
    return Template((here / "page.html").read_text("utf-8")).substitute(
        headline=_headline(result),
        lead=_lead(stats),
        shares=_shares(stats),
        facts="".join(
            f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd></div>"
            for k, v in facts.items()
        ),
        prompt=html.escape(prompt),
        # a long one would push the samples off the first screen
        open=" open" if len(prompt) < 600 else "",
        style=(here / "report.css").read_text("utf-8"),
        # no text of a model can end the element it stands in
        run=json.dumps(run).replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        script=(here / "report.js").read_text("utf-8"),
    )


def _headline(result: dict) -> str:
    count = len(result["tokens"])
    samples = "1 sample" if count == 1 else f"{count} samples of one prompt"
    return f"{samples}, {result['stats']['tokens_per_step']:.2f} tokens a step"


def _lead(stats: dict) -> str:
    if not stats["nodes_proposed"]:
        return "Nothing was drafted: plain sampling, one token of a sample a step."
    return (
        "csd drafts each sample from the other samples of its prompt and accepts a draft only "
        "where it equals the model's own sample: the texts are plain sampling's. "
        f"{stats['nodes_accepted']:,} of {stats['nodes_proposed']:,} drafted tokens were accepted, "
        f"so {stats['tokens']:,} tokens took {stats['sample_steps']:,} passes of a sample through "
        f"the model in place of {stats['tokens']:,}."
    )


def _shares(stats: dict) -> str:
    """The page's legend: a bar of where tokens came from."""
    sampled = stats["tokens"] - stats["nodes_accepted"]
    # a run of before there were histories has no count of theirs
    counts = {"sampled": sampled, "history": 0, "model": 0, **stats["accepted"]}
    total = max(stats["tokens"], 1)
    return "".join(
        f'<span style="background:{figures.COLOURS[s]};flex:{counts[s] / total:.4f} 1 0">'
        f"{figures.NAMES[s]} {counts[s] / total:.0%}</span>"
        for s in data.SOURCES
        if counts[s] or s != "model"
    )


def _samples(result: dict, decision: data.Decision) -> list[dict]:
    answers = dict(enumerate(decision.answers))
    alone = data.alone_from(result["tokens"])
    return [
        {
            "finish": result["finish_reasons"][i],
            "answer": answers.get(i),
            "voted": decision.answer is not None and answers.get(i) == decision.answer,
            "alone": alone[i],
            "steps": result["steps"][i],
            "sources": [s or "sampled" for s in result["sources"][i]],
            "characters": data.characters(result, i),
            "logprobs": [round(p, 4) for p in result["logprobs"][i]],
        }
        for i in range(len(result["tokens"]))
    ]
