"""How strict the source paper's drafter is, against tau and the drafts it uses.

One knob at a time, from k = 4, no edits, alpha = 0.5, no minimum weight, all siblings; as a chain,
as published, and as a tree. Where k tokens are not found, fewer are looked up, except under "k, no
fewer". Edits need a query of 2 * edits + 2 tokens, so there k is 6.
"""

from bench.study.box import Box
from bench.study.measure import figures, likeness, mean, replayed
from csd.graph.paper import Paper

SAMPLES, NODES, PROBLEMS = 8, 16, 4
KNOBS = {
    "k": [{"k": k} for k in (1, 2, 4, 8)],
    "k, no fewer": [{"k": k, "shrink": False} for k in (2, 4, 6)],
    "alpha": [{"alpha": a} for a in (0.0, 0.5, 1.0)],
    "edits": [{"k": 6, "edits": e} for e in (0, 1, 2)],
    "least": [{"least": w} for w in (0.0, 0.4, 0.6, 0.8)],
    "siblings": [{"siblings": n} for n in (1, 2, 4, 7)],
}


def run(box: Box) -> None:
    sets = [("sums", box.recorded("sums/", "@0.7")), *box.further(PROBLEMS)]
    for name, traces in sets:
        alike = mean([likeness(t.samples[:SAMPLES]) for t in traces])
        box.notes.append(
            f"{name}: replay commits the recording, so at every setting {alike['distinct']:.1f} of "
            f"{SAMPLES} samples differ and two share {alike['prefix']:.1f} first tokens"
        )
        for drafter in ("consensus", "prompt-lookup"):
            found = replayed(traces, drafter, SAMPLES, NODES)
            box.add(trace=name, drafter=drafter, knob="", value=0, **figures(found))
    cases = [
        (name, traces, shape, knob, options)
        for knob, settings in KNOBS.items()
        for options in (settings[:2] if box.quick else settings)
        for shape in ("chain", "tree")
        for name, traces in sets
    ]
    for name, traces, shape, knob, options in box.while_time("settings", cases):

        def drafter(shape=shape, options=options):
            return Paper(tree=shape == "tree", **options)

        found = replayed(traces, drafter, SAMPLES, NODES)
        box.add(
            trace=name,
            drafter=shape,
            knob=knob,
            value=options[knob.split(",")[0]],
            **figures(found),
        )
