"""Chunks of several prompts in one pass: rows, places and attention are each prompt's own."""

import pytest
import torch

from csd.kernels.attention.prompt import PromptChunk, PromptRows, prompt_attention

# tokens before a chunk and of it: single rows, borders of pages, and first chunks beside later ones
CASES = {
    "begin": [(0, 5), (0, 1), (0, 70)],
    "later": [(64, 3), (0, 64), (63, 2), (130, 1)],
    "one": [(0, 9)],
    "one row each": [(0, 1), (5, 1)],
}
D, H, K = 16, 4, 2


def pages_of(cases):
    """A table of prompt pages, scattered and with a group that no case has between any two."""
    free = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.full((2 * len(cases), 4), -1, dtype=torch.int32)
    for i, (start, rows) in enumerate(cases):
        for page in range(-(-(start + rows) // 64)):
            table[2 * i, page] = free.pop()
    return table


def rows_of(cases):
    tokens = iter(range(1000))
    return PromptRows.of(
        [
            PromptChunk(2 * i, [next(tokens) for _ in range(n)], start)
            for i, (start, n) in enumerate(cases)
        ],
        pages_of(cases),
    )


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_each_row_has_its_place(cases):
    rows, table = rows_of(cases), pages_of(cases)
    places = [(2 * i, start + r) for i, (start, n) in enumerate(cases) for r in range(n)]
    assert rows.token.tolist() == list(range(len(places)))
    assert rows.position.tolist() == [p for _, p in places]
    want = [int(table[g, p // 64]) * 64 + p % 64 for g, p in places]
    assert rows.index.tolist() == want
    assert rows.begin == (not any(start for start, _ in cases))
    assert rows.chunks.row_ends.tolist()[-1] == len(places)
    assert rows.chunks.key_ends.tolist()[-1] == sum(map(sum, cases))
    # of every prompt so far, out of pages that hold NaN wherever it has no token
    cache = torch.full((40, 64, 1, 1), float("nan"))
    for i, (start, n) in enumerate(cases):
        for p in range(start + n):
            cache[table[2 * i, p // 64], p % 64] = 1000 * i + p
    got = rows.keys_of(cache).flatten().tolist()
    assert got == [1000 * i + p for i, (start, n) in enumerate(cases) for p in range(start + n)]


def operands(cases, dtype):
    generator = torch.Generator().manual_seed(2)
    sizes = sum(n for _, n in cases), sum(map(sum, cases))

    def normal(tokens, heads):
        return torch.randn(tokens, heads, D, generator=generator).to(dtype)

    return normal(sizes[0], H), normal(sizes[1], K), normal(sizes[1], K)


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_attention_is_within_each_prompt(cases):
    q, k, v = operands(cases, torch.float64)
    got = prompt_attention(q, k, v, rows_of(cases).chunks, 0.3)
    want = torch.empty_like(q)
    row = first = 0
    for start, n in cases:
        for r in range(n):
            seen = slice(first, first + start + r + 1)
            for h in range(H):
                score = (0.3 * k[seen, h // 2] @ q[row, h]).softmax(0)
                want[row, h] = score @ v[seen, h // 2]
            row += 1
        first += start + n
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_a_chunk_has_the_bits_that_it_has_alone(cases, dtype):
    q, k, v = operands(cases, dtype)
    got = prompt_attention(q, k, v, rows_of(cases).chunks, 0.3)
    row = first = 0
    for start, n in cases:
        keys = slice(first, first + start + n)
        alone = rows_of([(start, n)]).chunks
        own = prompt_attention(q[row : row + n], k[keys], v[keys], alone, 0.3)
        assert torch.equal(own, got[row : row + n])
        row, first = row + n, first + start + n


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q": torch.zeros(9, 3, D)}, r"H a multiple of K, got \(9, 3, 16\)"),
        ({"q": torch.zeros(8, H, D)}, r"q must have shape \(9, \*, \*\), got \(8, 4, 16\)"),
        ({"k": torch.zeros(8, K, D)}, r"k must have shape \(9, 2, 16\), got \(8, 2, 16\)"),
        ({"v": torch.zeros(9, K, D).half()}, "v must be torch.float32"),
    ],
)
def test_errors(change, message):
    q, k, v = operands(CASES["one"], torch.float32)
    case = dict(q=q, k=k, v=v, chunks=rows_of(CASES["one"]).chunks, scale=0.3) | change
    with pytest.raises(ValueError, match=message):
        prompt_attention(**case)
