"""Self-consistency over a file of problems, shared out among machines by Ray Data.

needs `pip install 'ray[data]>=2.50'`. Each actor has an engine of its own and draws some rows at a
time, a group each. An actor that dies is replaced and its rows are drawn again: the same samples,
because a sample follows from (model, prompt, seed, index). With GPUs: `ray_args={"num_gpus": 1}`.

    python examples/ray_data.py problems.jsonl answers --actors 2 --num-samples 8

reads JSON lines with the field `prompt`, writes Parquet with `texts`, `tokens`, `logprobs` and
`finish_reasons` beside it, and prints each majority.
"""

import argparse
import os
from collections import Counter

import pyarrow.parquet as pq
import ray.data

import csd.integrations.ray
from csd.evaluate.vote import answer_of
from csd.models.demo import smollm2_path


def main(
    problems: str,
    answers: str,
    model: str | None = None,
    actors: int = 2,
    num_samples: int = 8,
    max_new_tokens: int = 200,
    batch_size: int = 4,
) -> None:
    if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
        # an actor holds a CPU of Ray's count; with none left to read and write, nothing would start
        ray.init(num_cpus=max(os.cpu_count() or 1, actors + 2))
    drawn = csd.integrations.ray.sample(
        ray.data.read_json(problems).repartition(4 * actors),
        model or smollm2_path(),
        actors=actors,
        batch_size=batch_size,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        temperature=0.7,
        seed=0,
    )
    drawn.write_parquet(answers)
    for row in pq.read_table(answers).to_pylist():
        votes = Counter(filter(None, map(answer_of, row["texts"])))
        count = max(votes.values(), default=0)
        first = [answer for answer in votes if votes[answer] == count]
        won = f"{first[0]}, {count} of {len(row['texts'])}" if len(first) == 1 else "no majority"
        print(f"{row['prompt']!r}: {won}; {sum(map(len, row['tokens']))} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems")
    parser.add_argument("answers")
    parser.add_argument("--model", help="folder, hub name or GGUF file; SmolLM2-135M if left out")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    main(**vars(parser.parse_args()))
