"""The page's charts, as the traces and layouts that plotly.js draws."""

import html
from typing import Any

from csd.evaluate.report import data

COLOURS = {
    "sampled": "#ececec", "own": "#8ecae6", "sibling": "#f4a259", "prompt": "#b8a1e3",
    "history": "#9bd18b", "model": "#e58fb1",
}  # fmt: skip
NAMES = {
    "sampled": "sampled, not drafted", "own": "drafted from the sample itself",
    "sibling": "drafted from a sibling", "prompt": "drafted from the prompt",
    "history": "drafted from an earlier call's sample", "model": "drafted by a draft model",
}  # fmt: skip
VOTED = "#2a6f4e"
FONT = {"family": "system-ui, sans-serif", "size": 13}


def votes(decision: data.Decision) -> dict:
    """A bar an answer, most votes first; samples without an answer last."""
    names: dict = {}
    for i, answer in enumerate(decision.answers):
        names.setdefault(answer, []).append(i)
    order = sorted(names, key=lambda a: (a is None, -len(names[a]), names[a][0]))
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": [len(names[a]) for a in order],
        "y": list(range(len(order))),
        "text": [", ".join(map(str, names[a])) for a in order],
        "hovertemplate": "%{customdata}: %{x} of "
        f"{len(decision.answers)}<br>samples %{{text}}<extra></extra>",
        "customdata": [_answer(a, 400, wrap=80) for a in order],
        "marker": {"color": [
            VOTED if a is not None and a == decision.answer else "#cccccc"
            for a in order
        ]},
    }  # fmt: skip
    # by place: two long answers may be cut to the same name
    places = {"tickvals": list(range(len(order))), "ticktext": [_answer(a, 40) for a in order]}
    axes = {
        "yaxis": {"autorange": "reversed", "automargin": True, "zeroline": False, **places},
        "xaxis": {"title": {"text": "samples"}, "dtick": max(1, len(decision.answers) // 8)},
    }
    return figure([bar], height=max(160, 90 + 28 * len(order)), **axes)


def _answer(answer: str | None, longest: int, wrap: int = 0) -> str:
    return "no answer" if answer is None else label(answer, longest, wrap)


def steps(result: dict) -> dict:
    """Tokens committed in a step by a sample in flight, stacked by where they were drafted."""
    counts = data.tokens_per_step(result)
    x = list(range(1, len(counts["live"]) + 1))
    bars = [
        {
            "type": "bar",
            "name": source,
            "x": x,
            "y": [c / max(n, 1) for c, n in zip(counts[source], counts["live"], strict=True)],
            "marker": {"color": COLOURS[source]},
        }
        for source in data.SOURCES
        if source in counts
    ]
    tick = max(1, max(counts["live"], default=1) // 4)
    live = {
        "type": "scatter", "mode": "lines", "name": "samples in flight", "x": x,
        "y": counts["live"], "yaxis": "y2", "line": {"color": "#555", "width": 1, "shape": "hv"},
    }  # fmt: skip
    return figure(
        [*bars, live],
        barmode="stack",
        bargap=0,
        height=280,
        hovermode="x unified",
        xaxis={"title": {"text": "step"}},
        yaxis={"title": {"text": "tokens"}, "rangemode": "tozero"},
        yaxis2={"title": {"text": "samples in flight"}, "overlaying": "y", "side": "right",
                "range": [0, 1.06 * max([1, *counts["live"]])], "showgrid": False, "dtick": tick},
        legend={"orientation": "h", "y": 1.15, "traceorder": "normal"},
    )  # fmt: skip


def divergence(result: dict) -> dict:
    """An icicle: a box is a run of tokens that its samples share, as high as they are many."""
    tokens = result["tokens"]
    nodes = data.divergence(tokens)
    texts = [data.text_between(result, n["samples"][0], n["start"], n["end"]) for n in nodes]
    icicle = {
        "type": "icicle",
        "ids": [str(n["id"]) for n in nodes],
        "parents": ["" if n["parent"] < 0 else str(n["parent"]) for n in nodes],
        "values": [len(n["samples"]) for n in nodes],
        "labels": [label(t, 48) or "(start)" for t in texts],
        "branchvalues": "total",
        "sort": False,
        "tiling": {"orientation": "h"},
        "marker": {"colors": [len(n["samples"]) for n in nodes],
                   "colorscale": [[0, "#eef3f1"], [1, "#9cc5b1"]]},
        "customdata": [
            [f"samples {', '.join(map(str, n['samples']))}",
             f"tokens {n['start']} to {n['end']}", label(t, 400, wrap=80)]
            for n, t in zip(nodes, texts, strict=True)
        ],
        "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
    }  # fmt: skip
    return figure([icicle], height=max(220, 34 * len(tokens) + 40))


def figure(traces: list[dict], **layout: Any) -> dict:
    margin = {"l": 60, "r": 60, "t": 30, "b": 45}
    return {"data": traces, "layout": {"margin": margin, "font": FONT, **layout}}


def label(text: str, longest: int, wrap: int = 0) -> str:
    """A text that plotly shows as it is: plotly reads tags and entities in labels."""
    text = text.replace("\n", "↵")
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    if not wrap:
        return html.escape(text, quote=False)
    lines = [text[i : i + wrap] for i in range(0, len(text), wrap)]
    return "<br>".join(html.escape(line, quote=False) for line in lines)
