"""State of the slots and groups: one device tensor per property, never a captured scalar.

A slot holds one sample in flight, a group one prompt. Slot s is live if `live[s]` is true; a dead
slot has no rows in the pool. Kernels read all of a sample's state here, so a replayed step uses
refilled slots and new limits without a new capture.
"""

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING

import torch

from csd.state.filters import FILTERS, dtype_of
from csd.state.record import allocate, tensor

MAX_STOP_IDS = 16


if TYPE_CHECKING:

    class _Filters:
        def __getattr__(self, name: str) -> torch.Tensor: ...

else:
    _Filters = make_dataclass(
        "_Filters",
        [(name, torch.Tensor, tensor("S", dtype_of(name), off)) for name, off in FILTERS.items()],
        slots=True,
    )


@dataclass(slots=True)
class Slots(_Filters):
    """S slots, G groups, N tokens of context, at most T tokens per sample, V vocabulary.

    words = ceil(V / 32). A field with dtype None has that of log-probabilities. Each
    filter that `csd.state.filters` declares is a field [S].
    """

    # identity
    live: torch.Tensor = tensor("S", torch.bool, False)
    group: torch.Tensor = tensor("S", fill=-1)  # the group's index, -1 when the slot is free
    key: torch.Tensor = tensor("S", torch.int64)  # Philox key of (seed, prompt)
    sample: torch.Tensor = tensor("S")  # sample index
    # equal for live slots of a group whose samples have equal tokens so far (`csd/kernels/texts`)
    leader: torch.Tensor = tensor("S", fill=-1)
    # progress
    generated: torch.Tensor = tensor("S")  # tokens generated; also tokens in the slot's KV cache
    context: torch.Tensor = tensor("S N", fill=-1)  # last tokens, latest first, -1 before them
    step: torch.Tensor = tensor("S")  # steps the slot has made
    tokens: torch.Tensor = tensor("S T", fill=-1)  # generated tokens
    logprobs: torch.Tensor = tensor("S T", None)  # of the processed distribution
    raw_logprobs: torch.Tensor = tensor("S T", None)  # of the model
    # per token (`csd.state.pool_builder.progress_penalties`)
    progress_penalty: torch.Tensor = tensor("S")
    seen: torch.Tensor = tensor("S words")  # bitmap of the tokens in prompt and sample
    # stopping
    max_new: torch.Tensor = tensor("S")
    min_new: torch.Tensor = tensor("S")  # end tokens cannot be sampled before this many tokens
    # tokens that end the sample, and tokens that are banned before `min_new` tokens; -1 is unused
    stop_ids: torch.Tensor = tensor(f"S {MAX_STOP_IDS}", fill=-1)
    ban_ids: torch.Tensor = tensor(f"S {MAX_STOP_IDS}", fill=-1)
    # the groups
    prompt_len: torch.Tensor = tensor("G")  # tokens in the prompt's pages: all but the last
    group_key: torch.Tensor = tensor("G", torch.int64, -1)  # never reused, -1 when free
    prior_part: torch.Tensor = tensor("G")  # part of the prior's table that the group reads

    @classmethod
    def empty(
        cls,
        slots: int,
        vocab: int,
        max_new: int,
        context: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> "Slots":
        """Returns free slots, and as many groups: a group in flight has at least one slot.

        dtype: that of log-probabilities, float32 or float64.
        """
        words = (vocab + 31) // 32
        sizes = {"S": slots, "G": slots, "N": context, "T": max_new, "words": words}
        return cls(**allocate(cls, sizes, device, dtype, filled=True))

    @property
    def count(self) -> int:
        return self.live.shape[0]
