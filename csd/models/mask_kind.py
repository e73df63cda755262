"""Kind of a mask of transformers: causal alone, causal within a window, or within chunks.

The mask function is evaluated at positions around 2^20, farther than any window, and at the borders
of the window or chunk that these values suggest. The other arguments of an attention call do not
decide: Llama 4 passes its chunks in none of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

FAR = 1 << 20
# tokens that are checked on both sides of a border
NEAR = 70


class OtherMask(ValueError):
    """A mask that is neither causal nor causal within a window or chunks."""


def window_and_chunk(
    mask_function: Callable, device: torch.device
) -> tuple[int | None, int | None]:
    """Window and chunk, in tokens, of a mask function of `transformers.masking_utils`.

    At least one of the two is None. Raises OtherMask for a mask of another kind.
    """
    mask = _Mask(mask_function, device)
    seen = mask.seen([FAR], range(FAR + 1))
    if not seen.any():
        raise OtherMask(f"its mask hides all tokens from row {FAR}")
    first = int(seen.int().argmax())
    if first == 0:
        mask.check(None, None)
        return None, None
    # number of rows from FAR on that see the key: 1 for a window, the rest of the chunk for chunks
    rows = int(mask.seen(range(FAR, 2 * FAR), [first]).int().cumprod(0).sum())
    window, chunk = FAR - first + 1, FAR - first + rows
    if rows == 1 and mask.is_like(window, None):
        return window, None
    mask.check(None, chunk)
    return None, chunk


@dataclass(slots=True)
class _Mask:
    function: Callable
    device: torch.device

    def seen(self, rows: "list[int] | range", keys: "list[int] | range") -> torch.Tensor:
        """Flat bool tensor: whether rows see keys, one of the two having one element."""
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=self.device)
        row, key = (
            torch.arange(x.start, x.stop, device=self.device)
            if isinstance(x, range)
            else torch.tensor(x, device=self.device)
            for x in (rows, keys)
        )
        try:
            found = self.function(zero, zero, row[None, None, :, None], key[None, None, None])
        # the function may index a tensor of the text's length
        except (IndexError, RuntimeError, TypeError) as error:
            raise OtherMask(f"its mask depends on more than positions: {error}") from error
        return found.expand(1, 1, row.numel(), key.numel()).flatten().cpu()

    def check(self, window: int | None, chunk: int | None) -> None:
        if not self.is_like(window, chunk):
            raise OtherMask("its mask is neither causal, nor a sliding window, nor chunked")

    def is_like(self, window: int | None, chunk: int | None) -> bool:
        size = window or chunk or 100
        for row in (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, FAR - 1, FAR, FAR + 1):
            first = 0 if window is None else max(0, row - window + 1)
            first = first if chunk is None else row // chunk * chunk
            for border in (first, row):
                keys = range(max(0, border - NEAR), border + NEAR)
                want = torch.tensor([first <= key <= row for key in keys])
                if not torch.equal(self.seen([row], keys), want):
                    return False
        return True
