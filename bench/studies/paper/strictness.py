"""Strictness of the source paper's drafter: its effect on tau and on accepted drafts.

One parameter varies at a time, with drafts as a chain, as published, and as a tree. The paper's
method looks up exactly k = 4 tokens, with exact matches and those within eps edits: "k" with eps 0,
"eps" with k = 4 and with k = 6. "Shrinking" is our variant: exact matches, and fewer tokens if k
are not found; its base is k = 4, no edits, alpha = 0.5, no minimum weight, all siblings. There
edits need a query of 2 * edits + 2 tokens, so k is 6.
"""

from bench.studies.paper.box import Box
from bench.studies.paper.measure import figures, likeness, mean, replayed
from csd.graph.baselines.multi_sample_paper import Paper

SAMPLES, NODES, PROBLEMS = 8, 16, 4
KNOBS = {
    "k": [{"k": k, "edits": 0} for k in (2, 4, 6)],
    "eps, k = 4": [{"edits": e} for e in (0, 1, 2)],
    "eps, k = 6": [{"k": 6, "edits": e} for e in (0, 1, 2)],
    "alpha": [{"alpha": a} for a in (0.0, 0.5, 1.0)],
    "k, shrinking": [{"k": k} for k in (1, 2, 4, 8)],
    "eps, shrinking": [{"k": 6, "edits": e} for e in (0, 1, 2)],
    "least, shrinking": [{"least": w} for w in (0.0, 0.6, 0.8)],
    "siblings, shrinking": [{"siblings": n} for n in (1, 2, 4, 7)],
}
SHRINKING = {"edits": 0, "shrink": True}


def run(box: Box) -> None:
    done = {(r["trace"], r["drafter"], r["knob"], r["value"]) for r in box.rows}
    sets = [("sums", box.recorded("sums/", "@0.7")), *box.further(PROBLEMS)]
    for name, traces in sets:
        alike = mean([likeness(t.samples[:SAMPLES]) for t in traces])
        box.notes.append(
            f"{name}: replay commits the recording, so at every setting {alike['distinct']:.1f} of "
            f"{SAMPLES} samples differ and two share {alike['prefix']:.1f} first tokens"
        )
        for drafter in ("consensus", "prompt-lookup"):
            if (name, drafter, "", 0) in done:
                continue
            results = replayed(traces, drafter, SAMPLES, NODES)
            box.add(trace=name, drafter=drafter, knob="", value=0, **figures(results))
    cases = [
        (name, traces, shape, knob, options)
        for knob, settings in KNOBS.items()
        for options in (settings[:2] if box.quick else settings)
        for shape in ("chain", "tree")
        for name, traces in sets
        if (name, shape, knob, _value(knob, options)) not in done
    ]
    for name, traces, shape, knob, options in box.while_time("settings", cases):
        more = SHRINKING | options if "shrinking" in knob else options

        def drafter(shape=shape, more=more):
            return Paper(tree=shape == "tree", **more)

        results = replayed(traces, drafter, SAMPLES, NODES)
        box.add(
            trace=name,
            drafter=shape,
            knob=knob,
            value=_value(knob, options),
            **figures(results),
        )


def _value(knob: str, options: dict) -> float:
    """Value of the varied parameter."""
    return options["edits" if knob.startswith("eps") else knob.split(",")[0]]
