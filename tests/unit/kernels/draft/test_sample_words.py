"""The words that will sample tokens, for drafters that couple to them on the device."""

import pytest
import torch

from csd.kernels.common.noise import SAMPLE, philox_words
from csd.kernels.draft.sample_words import sample_words, sample_words_ref, sample_words_triton

pytestmark = pytest.mark.compiled


def operands(S, F, W, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def ints(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    key = ints(-(2**62), 2**62, S, dtype=torch.int64)
    return key, ints(0, 1000, S), ints(0, S, F), ints(0, 4000, F), ints(0, 200_000, F, W)


@pytest.mark.parametrize(
    ("S", "F", "W"), [(1, 1, 1), (3, 5, 7), (4, 9, 128), (2, 3, 129), (7, 2, 300)]
)
def test_the_kernel_gives_the_references_words(S, F, W):
    args = operands(S, F, W, seed=W)
    want = sample_words_ref(*args)
    assert torch.equal(sample_words_triton(*args), want)
    assert torch.equal(sample_words(*args), want)
    assert int(want.min()) >= 0 and int(want.max()) < 1 << 32


def test_a_word_is_that_of_its_slots_key_and_sample():
    key, sample, slot, position, token = operands(3, 4, 5)
    got = sample_words_ref(key, sample, slot, position, token)
    for f in range(4):
        s = int(slot[f])
        want = philox_words(
            key[s].numpy(),
            token[f].long().numpy(),
            position[f].long().numpy(),
            sample[s].long().numpy(),
            SAMPLE,
        )
        assert got[f].tolist() == want.tolist()


def test_edges_of_the_words():
    """The largest position, sample and token, and keys whose upper half is negative."""
    key = torch.tensor([-1, -(2**63), 2**63 - 1, 0])
    top = 2**31 - 1
    sample = torch.tensor([top, 0, 1, top], dtype=torch.int32)
    slot = torch.arange(4, dtype=torch.int32)
    position = torch.tensor([0, top, 1, top], dtype=torch.int32)
    token = torch.tensor([[0, top, 3, 4]] * 4, dtype=torch.int32)
    args = key, sample, slot, position, token
    assert torch.equal(sample_words_triton(*args), sample_words_ref(*args))


def test_nothing_to_do():
    key, sample, slot, position, token = operands(2, 3, 4)
    for empty in (token[:, :0], token[:0]):
        f = empty.shape[0]
        args = key, sample, slot[:f], position[:f], empty.contiguous()
        assert sample_words_triton(*args).shape == sample_words(*args).shape == empty.shape


def test_wrong_operands():
    key, sample, slot, position, token = operands(2, 3, 4)
    with pytest.raises(ValueError, match="position"):
        sample_words(key, sample, slot, position[:2], token)
    with pytest.raises((TypeError, ValueError), match="token"):
        sample_words(key, sample, slot, position, token.long())
