"""State of the slots and groups: one device tensor per property, never a captured scalar.

A slot holds one sample in flight, a group one prompt. Slot s is live if `live[s]` is true; a dead
slot has no rows in the pool. Kernels read all of a sample's state here, so a replayed step uses
refilled slots and new limits without a new capture.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any

import torch

from csd.state.filters import FILTERS, dtype_of

MAX_STOP_IDS = 16


def _tensor(shape: str, dtype: torch.dtype | None = torch.int32, fill: float = 0) -> Any:
    """A field: the letters of its shape, its dtype, and its value for a free slot."""
    return field(metadata={"shape": shape, "dtype": dtype, "fill": fill})


if TYPE_CHECKING:

    class _Filters:
        def __getattr__(self, name: str) -> torch.Tensor: ...

else:
    _Filters = make_dataclass(
        "_Filters",
        [(name, torch.Tensor, _tensor("S", dtype_of(name), off)) for name, off in FILTERS.items()],
        slots=True,
    )


@dataclass(slots=True)
class Slots(_Filters):
    """S slots, G groups, N tokens of context, at most T tokens per sample, V vocabulary.

    I = MAX_STOP_IDS, W = ceil(V / 32). A field with dtype None has that of log-probabilities. Each
    filter that `csd.state.filters` declares is a field [S].
    """

    # identity
    live: torch.Tensor = _tensor("S", torch.bool, False)
    group: torch.Tensor = _tensor("S", fill=-1)  # the group's index, -1 when the slot is free
    key: torch.Tensor = _tensor("S", torch.int64)  # Philox key of (seed, prompt)
    sample: torch.Tensor = _tensor("S")  # sample index
    # progress
    generated: torch.Tensor = _tensor("S")  # tokens generated; also tokens in the slot's KV cache
    context: torch.Tensor = _tensor("SN", fill=-1)  # last tokens, latest first, -1 before them
    step: torch.Tensor = _tensor("S")  # steps the slot has made
    tokens: torch.Tensor = _tensor("ST", fill=-1)  # generated tokens
    logprobs: torch.Tensor = _tensor("ST", None)  # of the processed distribution
    raw_logprobs: torch.Tensor = _tensor("ST", None)  # of the model
    progress_penalty: torch.Tensor = _tensor(
        "S"
    )  # per token (`csd.state.pool_builder.progress_penalties`)
    seen: torch.Tensor = _tensor("SW")  # bitmap of the tokens in prompt and sample
    # stopping
    max_new: torch.Tensor = _tensor("S")
    min_new: torch.Tensor = _tensor("S")  # end tokens cannot be sampled before this many tokens
    stop_ids: torch.Tensor = _tensor("SI", fill=-1)  # -1 is unused; these end the sample
    ban_ids: torch.Tensor = _tensor("SI", fill=-1)  # tokens that are banned before `min_new` tokens
    # the groups
    prompt_len: torch.Tensor = _tensor("G")  # tokens in the prompt's pages: all but the last
    group_key: torch.Tensor = _tensor("G", torch.int64, -1)  # never reused, -1 when free
    prior_part: torch.Tensor = _tensor("G")  # part of the prior's table that the group reads

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
        sizes = {
            "S": slots,
            "G": slots,
            "N": context,
            "T": max_new,
            "W": (vocab + 31) // 32,
            "I": MAX_STOP_IDS,
        }

        def made(shape: str, fill: float, **kind: torch.dtype | None) -> torch.Tensor:
            size = [sizes[letter] for letter in shape]
            return torch.full(size, fill, dtype=kind["dtype"] or dtype, device=device)

        return cls(**{f.name: made(**f.metadata) for f in fields(cls)})

    @property
    def count(self) -> int:
        return self.live.shape[0]
