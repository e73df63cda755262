"""The page: what was counted, plotly.js and a little script, in one file that fetches nothing."""

import html
import json
from importlib.resources import files
from pathlib import PurePath
from string import Template

from csd.report import data, figures


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
    share = {k: v / max(stats["tokens"], 1) for k, v in stats["accepted"].items()}
    facts = {
        "model": PurePath(result.get("model", "")).name,
        "samples": len(result["tokens"]),
        "tokens": stats["tokens"],
        "steps": stats["steps"],
        "tokens per step": f"{stats['tokens_per_step']:.2f}",
        "drafted by": ", ".join(f"{k} {v:.0%}" for k, v in share.items()),
        "seed": result["seed"],
        "vote": "none" if decision.answer is None else
        f"{decision.answer} ({decision.count} of {len(decision.answers)})",
    }  # fmt: skip
    here = files("csd.report")
    return Template((here / "page.html").read_text("utf-8")).substitute(
        facts="".join(
            f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd></div>"
            for k, v in facts.items()
        ),
        prompt=html.escape("".join(data.pieces(result, result["prompt_ids"]))),
        legend="".join(
            f'<span style="background:{figures.COLOURS[s]}">{s}</span>' for s in data.SOURCES
        ),
        style=(here / "report.css").read_text("utf-8"),
        # no text of a model can end the element it stands in
        run=json.dumps(run).replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        script=(here / "report.js").read_text("utf-8"),
    )


def _samples(result: dict, decision: data.Decision) -> list[dict]:
    answers = dict(enumerate(decision.answers))
    alone = data.alone_from(result["tokens"])
    return [
        {
            "finish": result["finish_reasons"][i],
            "answer": answers.get(i),
            "alone": alone[i],
            "steps": result["steps"][i],
            "sources": [s or "sampled" for s in result["sources"][i]],
            "logprobs": [round(p, 4) for p in result["logprobs"][i]],
        }
        for i in range(len(result["tokens"]))
    ]
