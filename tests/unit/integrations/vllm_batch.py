"""vLLM's persistent batch and its config, without vLLM, and texts of samples."""

import random
from types import SimpleNamespace

import numpy as np

from csd.integrations.vllm import Proposer

END = 99


class Batch:
    """The part of vLLM that a proposer sees: a persistent batch whose rows requests hold.

    requests: name -> (prompt, all that it will sample).
    """

    def __init__(self, proposer, requests, rows, length=512):
        self.proposer, self.requests = proposer, requests
        self.ids = np.zeros((rows, length), np.int32)
        self.count = np.zeros(rows, np.int32)
        self.row = {}  # of the requests in the batch
        self.done = dict.fromkeys(requests, 0)  # tokens sampled
        self.drafts = dict.fromkeys(requests, ())
        self.tokens = self.row_steps = 0

    def put(self, name, row):
        """Into a row, as at its start, after preemption or where another row has become free."""
        prompt, sample = self.requests[name]
        text = [*prompt, *sample[: self.done[name]]]
        self.ids[row] = -7
        self.ids[row, : len(text)], self.count[row] = text, len(text)
        self.row[name] = row

    def remove(self, name):
        del self.row[name]
        self.drafts[name] = ()

    def step(self, prefilling=(), propose=True):
        """Verify the drafts of all requests in the batch and propose the next ones."""
        sampled = [[] for _ in range(max(self.row.values()) + 1)]
        for name, row in self.row.items():
            if name in prefilling:
                continue
            sample, at = self.requests[name][1], self.done[name]
            right = 0
            for drafted in self.drafts[name]:
                if at + right + 1 >= len(sample) or drafted != sample[at + right]:
                    break
                right += 1
            sampled[row] = sample[at : at + right + 1]
            end = self.count[row] + right + 1
            self.ids[row, self.count[row] : end], self.count[row] = sampled[row], end
            self.done[name] += right + 1
            self.tokens, self.row_steps = self.tokens + right + 1, self.row_steps + 1
        drafts = [[]] * len(sampled)
        if propose:
            drafts = self.proposer.propose(sampled, self.count, self.ids, slot_mappings=None)
        assert len(drafts) == len(sampled)
        for name, row in list(self.row.items()):
            self.drafts[name] = drafts[row]
            if self.done[name] == len(self.requests[name][1]):
                self.remove(name)

    def run(self):
        while self.row:
            self.step()


def config(k=4, rows=8, length=512):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(
            max_model_len=length,
            hf_config=SimpleNamespace(eos_token_id=END),
            try_get_generation_config=dict,
        ),
    )


def proposer(k=4, rows=8, length=512, **options):
    return type("Options", (Proposer,), options)(config(k, rows, length))


def samples(count, tokens, seed=0):
    """Variations of one text that repeats itself, of differing lengths, each with an end token."""
    draw = random.Random(seed)
    text = [draw.randrange(30) for _ in range(15)] * (tokens // 15 + 1)
    return [
        [t if draw.random() < 0.9 else draw.randrange(30) for t in text[: tokens - 3 * s]] + [END]
        for s in range(count)
    ]


PROMPT = [*range(40, 60)]


def begun(p, requests, rows=8):
    batch = Batch(p, requests, rows)
    for row, name in enumerate(requests):
        batch.put(name, row)
    return batch


def group_of(p, prompt=PROMPT):
    return p.rows.groups[np.array(prompt, np.int32).tobytes()]
