"""Data of the page's charts, as lists and dicts for JSON."""

from typing import Any

from csd.evaluate.report import data

NAMES = {
    "sampled": "sampled, not drafted",
    "own": "drafted from the sample itself",
    "sibling": "drafted from a sibling",
    "prompt": "drafted from the prompt",
    "history": "drafted from an earlier call's sample",
    "model": "drafted by a draft model",
    "prior": "drafted from answers to other prompts",
}


def votes(decision: data.Decision) -> list[dict[str, Any]]:
    """Answers with their samples, most votes first, None last: dicts of answer, samples, voted."""
    names: dict[str | None, list[int]] = {}
    for i, answer in enumerate(decision.answers):
        names.setdefault(answer, []).append(i)
    order = sorted(names, key=lambda a: (a is None, -len(names[a]), names[a][0]))
    won = None if decision.tied else decision.answer
    return [{"answer": a, "samples": names[a], "voted": a is not None and a == won} for a in order]


def steps(result: dict) -> dict[str, Any]:
    """Lists over steps: `live` samples in flight, and tokens per live sample from each source."""
    counts = data.tokens_per_step(result)
    live = counts.pop("live")
    return {
        "live": live,
        "sources": {
            source: [c / max(n, 1) for c, n in zip(values, live, strict=True)]
            for source, values in counts.items()
            if any(values)
        },
    }


def divergence(result: dict) -> list[dict[str, Any]]:
    """Runs of tokens that samples share: dicts of depth, start, end, samples, text, in
    the order of a tree: a run comes before those that go on from it."""
    tokens = result["tokens"]
    nodes = data.divergence(tokens)
    depth = {-1: -1}
    for node in nodes:
        depth[node["id"]] = depth[node["parent"]] + 1
    return [
        {
            "depth": depth[n["id"]],
            "start": n["start"],
            "end": n["end"],
            "samples": n["samples"],
            "text": data.text_between(result, n["samples"][0], n["start"], n["end"]),
        }
        for n in nodes
    ]
