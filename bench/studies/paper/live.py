"""tau of live runs compared to the replay of their samples.

csd draws each prompt with a fixed number of nodes per sample and records it. The recording is then
replayed with the noise that drew it, which follows from its seed, and with noise from the
posterior. A live run also has the target's probabilities at rejected nodes, which a recording does
not have.
"""

import json
import tempfile
from dataclasses import replace as changed
from pathlib import Path

import torch

import csd
from bench.e2e.cpu import PROBLEMS
from bench.lib.common import interval
from bench.studies.drafting.replay import tau
from bench.studies.paper.box import Box
from bench.studies.paper.measure import figures, replayed
from csd.kernels.common.noise import SAMPLE, gumbel, philox_words_ref, prompt_key
from csd.traces.traces import Trace, read_traces

TEMPERATURES = (0.6, 0.7, 1.0)
SAMPLES, NODES, TOKENS, SEEDS = 8, 8, 80, 3


def run(box: Box) -> None:
    n, tokens = (3, 24) if box.quick else (SAMPLES, TOKENS)
    engine = box.engine(n)
    for temperature in box.while_time("temperatures", TEMPERATURES):
        drawn = [record(engine, p, n, tokens, temperature) for p in questions(box)]
        stats, traces = [s for s, _ in drawn], [t for _, t in drawn]
        live = sum(s.tokens for s in stats) / sum(s.sample_steps for s in stats)
        low, high = interval(
            lambda pick, stats=stats: (
                sum(stats[i].tokens for i in pick) / sum(stats[i].sample_steps for i in pick)
            ),
            len(stats),
            1000,
        )
        box.add(
            temperature=temperature,
            what="live",
            prompts=len(stats),
            samples=n,
            tau=live,
            low=low,
            high=high,
        )
        # share=True: as many nodes as the live run had, also after samples have ended
        truly = [
            replayed([t], "consensus", n, NODES, share=True, noise=true_noise(t))[0] for t in traces
        ]
        box.add(temperature=temperature, what="replay, true noise", **figures(truly))
        drawn = [
            replayed(traces, "consensus", n, NODES, share=True, seed=seed) for seed in range(SEEDS)
        ]
        together = [r for results in drawn for r in results]
        box.add(temperature=temperature, what="replay, posterior noise", **figures(together))
        count = len(traces)

        def ratio(pick, truly=truly, drawn=drawn):
            return tau([truly[i] for i in pick]) / tau([r[i] for r in drawn for i in pick])

        low, high = interval(ratio, count, 1000)
        box.add(
            temperature=temperature,
            what="true / posterior",
            tau=ratio(range(count)),
            low=low,
            high=high,
        )
        for drafter in ("consensus", "prompt-lookup", "trie-prompt"):
            options = {"coupled": False} if drafter == "consensus" else {}
            replays = replayed(traces, drafter, n, NODES, share=True, **options)
            name = "consensus, not coupled" if options else drafter
            box.add(temperature=temperature, what=f"replay, {name}", **figures(replays))


def questions(box: Box) -> list[str]:
    """Prompts of the file `box.prompts`, or without one the word problems of `bench.e2e.cpu`."""
    texts = PROBLEMS
    if box.prompts:
        rows = [json.loads(line) for line in box.prompts.read_text().splitlines()[:4]]
        texts = [r.get("question") or r.get("problem") or r["prompt"] for r in rows]
    return texts[: 2 if box.quick else 4]


def record(engine, prompt: str, samples: int, tokens: int, temperature: float):
    """Draw a prompt; returns the statistics of the run and its trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        out = csd.generate(
            engine,
            [{"role": "user", "content": prompt}],
            num_samples=samples,
            seed=3,
            max_new_tokens=tokens,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            budget=NODES * samples,
            record=path,
        )
        (trace,) = read_traces(path)
    return out.stats, changed(trace, problem=prompt[:20])


def true_noise(trace: Trace):
    """Returns a function for the Gumbel noise that drew the trace, from its seed."""
    key = torch.tensor(prompt_key(trace.seed, trace.prompt))

    def noise(slot, position, token):
        word = philox_words_ref(key, token, position[:, None], slot[:, None], SAMPLE)
        return gumbel(word, torch.float64)

    return noise
