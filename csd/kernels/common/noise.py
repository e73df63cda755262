"""Keyed noise: Philox4x32-10 words and the exponential and Gumbel values made from them.

A word is a pure function of (key, counter). The key is a 64-bit mix of the seed and the prompt's
token ids; the counter is (token // 4, position, sample, stream), and token % 4 picks one of the
four words. So noise never depends on batch, drafts or the order of calls.

    v = (x + 1/2) / 2^32,   E = -log(1 - v)          exponential of word x
    G = -log(E)                                      Gumbel

E comes from its series below v = 2^-10, where 1 - v would lose digits, and from
-log(u), u = ((2^32 - 1 - x) + 1/2) / 2^32, above v = 1/2, where v may round to 1. Small E are
large Gumbels: they decide rare tokens, so they keep full relative precision.

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import Any

import numpy as np
import torch

# counter word 3. Streams from DRAFT on also carry the slot's step number in the bits above.
SAMPLE, REST, DRAFT, SELECT, ACCEPT, RESIDUAL = 0, 1, 2, 3, 4, 5

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
FACTORS = np.array((_M0, _M1), np.uint64)
# increments of the keys by round, modulo 2^32
BUMPS = np.array([[r * w & 0xFFFFFFFF for w in (_W0, _W1)] for r in range(10)], np.uint64)
_LOW, _HALF = np.uint64(_MASK), np.uint64(32)


def stepped(stream: int, step: Any) -> Any:
    """Counter word 3 of a stream from DRAFT on, at the slot's step number (integer or array)."""
    return step << 3 | stream


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def prompt_key(seed: int, prompt: list[int]) -> int:
    """Philox key of (seed, prompt): splitmix64 folded over the seed and each token id.

    Returns a signed 64-bit integer, as it is stored in an int64 tensor.
    """
    key = splitmix64(seed & 0xFFFFFFFFFFFFFFFF)
    for token in prompt:
        key = splitmix64(key ^ token)
    return key - (1 << 64) if key >= 1 << 63 else key


def philox_words_ref(
    key: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    sample: torch.Tensor,
    stream: torch.Tensor | int,
) -> torch.Tensor:
    """The uint32 word of each (key, token, position, sample, stream), as int64 in [0, 2^32).

    key: int64; token, position, sample: integers; stream: integers or one int. Shapes broadcast.
    """
    k, t, p, s = (x.numpy(force=True) for x in (key, token, position, sample))
    last = stream.numpy(force=True) if isinstance(stream, torch.Tensor) else stream
    return torch.from_numpy(philox_words(k, t, p, s, last)).to(token.device)


def philox_words(key: Any, token: Any, position: Any, sample: Any, stream: Any) -> np.ndarray:
    """`philox_words_ref` on numpy arrays: int64 words."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in (key, token, position, sample, stream)))
    # even counter words 0 and 2 are multiplied, odd ones 1 and 3 are mixed in
    even, odd = np.empty((2, 2, *shape), np.uint64)
    even[0], even[1] = token >> 2, sample
    odd[0], odd[1] = position, stream
    column = (2,) + (1,) * len(shape)
    factor = FACTORS.reshape(column)
    for keys in _round_keys(np.asarray(key), len(shape)):
        even *= factor
        odd ^= keys
        low = even & _LOW
        even >>= _HALF
        even = even[::-1] ^ odd
        odd = low[::-1]
    lane = token & 3
    half = np.where(lane & 1 == 0, even, odd)
    return np.where(lane < 2, half[0], half[1]).view(np.int64)


def _round_keys(key: np.ndarray, dims: int) -> np.ndarray:
    """Keys of the 10 rounds, [10, 2, 1 .., *key.shape]: `dims` dimensions after the first two."""
    halves = np.stack([key & _MASK, (key >> 32) & _MASK]).astype(np.uint64)
    halves = halves.reshape(2, *(1,) * (dims - key.ndim), *key.shape)
    return halves + BUMPS.reshape(10, 2, *(1,) * dims) & _LOW


def gumbel_words(word: np.ndarray) -> np.ndarray:
    """`gumbel` in float64 on a numpy array of words; float64 holds 1 - v exactly."""
    u = ((_MASK - word) + 0.5) * 2.0**-32
    return -np.log(-np.log(u))


def exponential(word: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Exponential value of uint32 words (held in int64): -log(1 - (word + 1/2) / 2^32) > 0."""
    v = (word.to(dtype) + 0.5) * 2.0**-32
    u = ((_MASK - word).to(dtype) + 0.5) * 2.0**-32
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v / 5))))
    return torch.where(v < 2.0**-10, series, torch.where(v > 0.5, -u.log(), -(1 - v).log()))


def gumbel(word: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gumbel value of uint32 words (held in int64); finite for every word."""
    return -exponential(word, dtype).log()


def uniform(word: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(word + 1/2) / 2^32, in (0, 1); in float32 the largest words give the float below 1."""
    u = (word.to(torch.float64) + 0.5) * 2.0**-32
    return u.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)
