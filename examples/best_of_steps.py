"""Step-level Best-of-N: draw several next lines, keep the best by a scorer, and branch from there.

    python examples/best_of_steps.py [MODEL]

The scorer is any function of a branch, such as a reward model over `branch.text`. Here it is the
mean log-probability of the sampled tokens, which costs no further token.
"""

import sys

import csd
from csd.engine.session import Branch
from csd.models.demo import smollm2_path

PROBLEM = (
    "A baker sells 12 loaves for $3 each and 5 cakes for $8 each. How much money does she get?"
)
KEPT, WIDTH, STEPS = 2, 4, 12


def score(branch: Branch) -> float:
    drawn = [x for x in branch.logprobs if x is not None]
    return sum(drawn) / len(drawn)


def main(model: str) -> None:
    engine = csd.Engine(model)
    session = engine.session([{"role": "user", "content": PROBLEM}], num_samples=8, seed=0)
    branches, done, drawn = session.branches, [], 0
    for _ in range(STEPS):
        lines = session.sample(branches, stop="\n", max_new_tokens=64, temperature=0.8)
        drawn += sum(len(line.tokens) for line in lines)
        ended = [line.stop_reason != "\n" for line in lines]
        done += [branch for branch, end in zip(branches, ended, strict=True) if end]
        going = [branch for branch, end in zip(branches, ended, strict=True) if not end]
        best = sorted(going, key=score)[-KEPT:]
        branches = [child for branch in best for child in branch.fork(WIDTH)]
    winner = max(done or branches, key=score)
    print(winner.text, f"\npath {winner.path}, mean log-probability {score(winner):.3f}")
    print(f"{drawn} tokens drawn, {session.read_tokens} read, {session.cached_tokens} not again")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else smollm2_path())
