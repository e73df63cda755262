"""A prior without any text: the model's likeliest tokens behind each single token.

`vocabulary_prior` runs the vocabulary as drafted nodes behind the opening of an answer: a pass has
the opening's last token as root of each sample, and tokens of the vocabulary as its children, whose
hidden states give the distributions behind them. The opening itself is read once per pass.
"""

from typing import Any

import torch

from csd.graph.drafter import Drafter
from csd.graph.host_tree import Row, pool_of_rows
from csd.graph.prior import MAX_CONTEXTS, Prior
from csd.kernels.ops import Ops
from csd.models.fused.decoder import DecoderLike
from csd.state.kv_cache import KVCache
from csd.state.pool import MAX_NODES, PRIOR, Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict

# samples of a pass, each with one row for the opening's last token and the rest for the vocabulary
SAMPLES = 4
CHILDREN = MAX_NODES - 1
# the chat template has the text between the opening of an answer and its first token
QUESTION = "Hello."


class Vocabulary(Drafter):
    """Drafts the tokens of the vocabulary in turn, and keeps the top tokens behind each.

    token, probability: the TOP likeliest tokens behind each token so far, by step.
    """

    def __init__(self, ops: Ops, device: str | torch.device):
        self.token: list[torch.Tensor] = []
        self.probability: list[torch.Tensor] = []
        self._next = 0

    def attach(self, decoder: DecoderLike, cache: KVCache) -> None:
        self._decoder = decoder

    @property
    def done(self) -> bool:
        return self._next >= self._decoder.config.vocab

    def observe_prompt(
        self, group_key: int, prompt: list[int], observed: int, read: int, slots: Slots
    ) -> int:
        return read

    def propose(self, slots: Slots, rows: int) -> Pool:
        """Draft the next tokens behind the roots of samples that have drawn nothing yet."""
        trees: dict[int, list[Row]] = {}
        live = slots.live.nonzero()[:, 0].tolist()
        room = rows - len(live)
        for s in live:
            first = self._next
            if not int(slots.generated[s]):
                count = min(CHILDREN, room, self._decoder.config.vocab - first)
                self._next, room = first + count, room - count
            trees[s] = [Row(t, -1, 1, 0, PRIOR) for t in range(first, self._next)]
        return pool_of_rows(trees, slots, rows)

    def observe_hidden(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        """Keep the top tokens behind the drafted ones, and nothing of what is drawn."""
        row = (pool.depth == 1).nonzero()[:, 0]
        if row.numel():
            order = pool.token[row].argsort()
            logits = self._decoder.logits(self._hidden[row[order]])
            probability, token = logits.float().softmax(1).topk(TOP, 1)
            self.token.append(token.int().cpu())
            self.probability.append(probability.cpu())


def vocabulary_prior(engine: Any) -> Prior:
    """Returns a prior of the model's TOP likeliest tokens behind each token, at temperature 1.

    A token stands where an answer begins. Takes one pass of the model over the vocabulary, in
    steps of SAMPLES * MAX_NODES rows. Raises as `generate` does.
    """
    drafters: list[Vocabulary] = []

    def drafter(ops: Ops, device: torch.device) -> Vocabulary:
        drafters.append(Vocabulary(ops, device))
        return drafters[-1]

    tokenizer = engine.tokenizer
    opening: Any = [0]
    if getattr(tokenizer, "chat_template", None):
        opening = [{"role": "user", "content": QUESTION}]
    elif getattr(tokenizer, "bos_token_id", None) is not None:
        opening = [tokenizer.bos_token_id]
    options = dict(
        num_samples=min(SAMPLES, engine.max_slots),
        max_new_tokens=2,
        min_new_tokens=0,
        seed=0,
        budget=SAMPLES * CHILDREN,
        drafter=drafter,
        progress=False,
    )
    while not drafters or not drafters[-1].done:
        engine.generate(opening, **options)
    prior = Prior(contexts=MAX_CONTEXTS, tokenizer=tokenizer)
    prior.add_successors(torch.cat(drafters[-1].token), torch.cat(drafters[-1].probability))
    return prior
