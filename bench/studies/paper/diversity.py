"""Diversity of samples drawn live: csd, plain sampling, and the control that copies.

All have the same prompts and seed. Lossless drafting gives the tokens of plain sampling, so its
diversity is the same by construction. The control's is not, and it falls further if samples start
after siblings have finished, with two samples in flight instead of all.
"""

import csd
from bench.e2e.cpu import PROBLEMS
from bench.studies.paper.box import Box
from bench.studies.paper.copying import copying
from bench.studies.paper.measure import likeness, mean
from csd.graph.baselines.multi_sample_paper import Paper

SAMPLES, NODES, TOKENS = 8, 6, 64
LOOSE, STRICT = {"k": 1}, {"k": 6, "least": 0.6}
SHRINKING = {"edits": 0, "shrink": True}


def run(box: Box) -> None:
    n, tokens = (4, 20) if box.quick else (SAMPLES, TOKENS)
    prompts = PROBLEMS[: 1 if box.quick else 4]
    engine, late = box.engine(n), box.engine(2)

    def draw(engine, **options):
        # one prompt after another, since the control supports one at a time
        return [
            csd.generate(
                engine,
                [{"role": "user", "content": p}],
                num_samples=n,
                seed=5,
                max_new_tokens=tokens,
                temperature=0.7,
                **options,
            )
            for p in prompts
        ]

    plain = draw(engine, speculate=False)

    def add(name, results):
        same = [
            a == b
            for x, y in zip(results, plain, strict=True)
            for a, b in zip(x.tokens, y.tokens, strict=True)
        ]
        alike = mean([likeness(r.tokens, r.texts) for r in results])
        committed = sum(r.stats.tokens for r in results)
        steps = sum(r.stats.sample_steps for r in results)
        box.add(
            verifier=name,
            tau=committed / steps,
            equal_to_plain=sum(same) / len(same),
            samples=n,
            prompts=len(prompts),
            **alike,
        )

    add("plain", plain)

    def paper(options):
        return lambda ops, device: Paper(tree=True, **SHRINKING, **options)

    def copied(engine):
        with copying(engine) as drafter:
            return draw(engine, drafter=drafter, budget=NODES * engine.max_slots)

    variants = {
        "csd": lambda: draw(engine, budget=NODES * n),
        "min(1, q/q_sibling), all in flight": lambda: copied(engine),
        "min(1, q/q_sibling), two in flight": lambda: copied(late),
        "paper's tree, loose": lambda: draw(engine, drafter=paper(LOOSE), budget=NODES * n),
        "paper's tree, strict": lambda: draw(engine, drafter=paper(STRICT), budget=NODES * n),
    }
    for name, variant in variants.items():
        if box.left < 0:
            box.notes.append(f"{name} left out: no time left")
            continue
        add(name, variant())
