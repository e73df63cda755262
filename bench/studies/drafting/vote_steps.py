"""Steps until a vote of N recorded answers is certain: plainly, with drafts, and with a prior.

    python -m bench vote_steps TRACES --tokenizer FOLDER [--samples 8] [--rows 184] [--json F]

Samples of a problem advance together, in steps of `--rows` rows: their roots, and drafts in the
rest, which samples that ended leave to the others. Steps are summed over problems, one problem
after another. A vote is certain once `csd.Vote` would stop: samples count in the order of their
indices. The last column counts them in the order of their ends, which csd does not, since the
shares of the votes would then depend on it: more than half of all samples have one answer. The
prior learns along the problems. Steps of equal rows take equal times where the model's weights
dominate, so the figures are times in units of a step; the drafter's own time is not in them.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

import csd
from bench.lib.common import finish, table
from csd.engine.results.result import Sample
from csd.evaluate.replay import Replayed, replay
from csd.graph.prior import Prior
from csd.graph.registry import make_drafter
from csd.kernels.backends import choose
from csd.state.pool import MAX_NODES
from csd.traces.traces import Trace, read_traces


def samples_of(trace: Trace, count: int, tokenizer) -> list[Sample]:
    """The first samples of a trace with their texts; those without an end token were cut."""
    samples = []
    for i, tokens in enumerate(trace.samples[:count]):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        ended = tokens[-1] in {tokenizer.eos_token_id, *trace.stop_ids}
        samples.append(Sample(i, text, tokens, [], [], "stop" if ended else "length"))
    return samples


def deciding(samples: list[Sample], vote: csd.Vote) -> int:
    """Number of first samples that decide the vote of all."""
    counts = range(1, len(samples) + 1)
    return next((n for n in counts if vote.decided(samples[:n], len(samples))), len(samples))


def majority(samples: list[Sample], ends: list[int]) -> int:
    """Step in which more than half of the samples have ended with one answer, else the last."""
    votes: dict[str | None, int] = {}
    for end, sample in sorted(zip(ends, samples, strict=True), key=lambda pair: pair[0]):
        answer = csd.vote([sample]).answer
        votes[answer] = votes.get(answer, 0) + 1
        if answer is not None and 2 * votes[answer] > len(samples):
            return end
    return max(ends)


def steps_of(traces: list[Trace], count: int, rows: int, prior: Prior | None) -> list[Replayed]:
    """Replays with drafts, which learn along the problems if there is a prior."""
    ops, device, replays = choose(None, torch.device("cpu"), torch.float32), torch.device("cpu"), []
    for trace in traces:
        contexts = 0 if prior is None else prior.config.capacity
        drafter = make_drafter("consensus", ops, device, prior_contexts=contexts)
        drafter.use_prior(prior)
        replays.append(replay(trace, drafter, count, rows // count - 1, share=True))
        if prior is not None:
            prior.add(trace.prompt, trace.samples[:count], trace.top and trace.top[:count])
    return replays


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces")
    parser.add_argument("--tokenizer", required=True, help="folder or hub name of the tokenizer")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rows", type=int, default=184, help="rows of a step")
    parser.add_argument("--problems", type=int, help="the first so many")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    if not 2 * args.samples <= args.rows <= MAX_NODES * args.samples:
        parser.error(f"rows must be from {2 * args.samples} to {MAX_NODES * args.samples}")
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    traces = list(read_traces(args.traces))[: args.problems]
    samples = [samples_of(t, args.samples, tokenizer) for t in traces]
    first = [deciding(x, csd.Vote()) for x in samples]
    ends = {
        "plain": [[len(tokens) for tokens in t.samples[: args.samples]] for t in traces],
        "csd": [r.ends for r in steps_of(traces, args.samples, args.rows, None)],
        "csd, a prior": [r.ends for r in steps_of(traces, args.samples, args.rows, Prior())],
    }
    rows = [
        {
            "engine": name,
            "steps to the last sample": sum(map(max, of)),
            "steps to a certain vote": sum(max(x[:n]) for x, n in zip(of, first, strict=True)),
            "to a majority in any order": sum(map(majority, samples, of)),
        }
        for name, of in ends.items()
    ]
    print(table(rows))
    result = {
        "bench": "vote_steps",
        "trace": Path(args.traces).name.split(".jsonl")[0],
        "problems": len(traces),
        "samples": args.samples,
        "rows_a_step": args.rows,
        "deciding": first,
        "ends": ends,
        "rows": rows,
    }
    finish(result, args.json)


if __name__ == "__main__":
    main()
