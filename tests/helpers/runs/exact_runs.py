"""A model's results for every committed token of a call, to compare bit for bit."""

from contextlib import contextmanager

import pytest
import torch

import csd
from csd.engine.step.step import Step
from csd.state.pool import model_row


@contextmanager
def recorded():
    """Hidden state and logits of every committed token: (key, sample, position) -> two rows."""
    rows: dict[tuple, tuple] = {}
    seen: list[torch.Tensor] = []
    forward, commit = Step.forward, Step.commit

    def forwards(self, pool):
        logits_of = self.decoder.logits

        def logits(hidden):
            seen[:] = [hidden]
            return logits_of(hidden)

        self.decoder.logits = logits
        try:
            seen.append(forward(self, pool))
        finally:
            del self.decoder.logits
        return seen[1]

    def commits(self, pool, verdict):
        hidden, logits = seen
        slots = self.slots
        for s, count in enumerate(verdict.accept_count.tolist()):
            for i in range(count):
                row = int(model_row(pool, verdict.accept_row[s, i]))
                # the slots have moved on
                place = int(slots.generated[s]) - count + i
                at = int(slots.key[s]), int(slots.sample[s]), place
                rows[at] = hidden[row].clone(), logits[row].clone()
        commit(self, pool, verdict)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "forward", forwards)
        patch.setattr(Step, "commit", commits)
        yield rows


def run(engine, prompts, count, **options):
    """Samples of all prompts, and what `recorded` saw of them."""
    with recorded() as rows:
        outs = csd.generate(engine, prompts, num_samples=count, **options)
    return outs, rows


def assert_same_bits(drafted, plain):
    """Tokens, log-probabilities, states and logits of a run, in another with more samples."""
    (outs, rows), (wanted, wanted_rows) = drafted, plain
    for out, want in zip(outs, wanted, strict=True):
        for sample, other in zip(out, want, strict=False):
            assert sample.tokens == other.tokens
            assert sample.logprobs == other.logprobs
            assert sample.raw_logprobs == other.raw_logprobs
    assert rows
    for at, (hidden, logits) in rows.items():
        assert torch.equal(hidden, wanted_rows[at][0]), f"hidden state of {at}"
        assert torch.equal(logits, wanted_rows[at][1]), f"logits of {at}"
