"""With `exact=True`, everything a sample is made of has the same bits in every run.

Whatever is drafted, however many samples share a step, in whatever order slots are refilled.
"""

import pytest
import torch
from helpers.models import checkpoints
from helpers.runs.exact_runs import assert_same_bits, run
from helpers.targets import few

import csd
from csd.models.exact_products import ExactProducts, RowBlocks
from csd.models.fused.linear import multiplies_bfloat16
from csd.models.load import load

DTYPES = (torch.bfloat16, torch.float32)
# budget, samples, slots: with few slots samples wait, and later ones draft from finished ones
RUNS = [(0, 3, 1), (1, 8, 3), (7, 11, 5), (16, 8, 8), (64, 11, 8), ("auto", 3, 2)]
PROMPTS = [(1, 64), (2, 65), (63, 130), (700,)]
CASES = [
    (family, dtype, i)
    for i, (family, dtype) in enumerate((f, d) for f in ("llama", "qwen2", "qwen3") for d in DTYPES)
]


def engine_of(loaded, slots):
    return csd.Engine(loaded, max_slots=slots, prefill_chunk=256, exact=True)


def loaded_of(family, dtype):
    loaded = load(checkpoints.build(family, dtype=dtype, max_position_embeddings=1024))
    # nothing else holds the module
    loaded.module = None
    return loaded


def some_prompts(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def options(length=84):
    # long enough for a second page behind the tail
    return dict(seed=3, max_new_tokens=length, temperature=0.7, top_p=0.95, ignore_eos=True)


@few(2)
@pytest.mark.parametrize(("family", "dtype", "i"), CASES, ids=str)
def test_a_run_with_drafts_has_the_bits_of_one_without(family, dtype, i):
    loaded = loaded_of(family, dtype)
    prompts = some_prompts(PROMPTS[i % 4])
    # every run in one dtype at least; a second one where products are fast
    fast = dtype == torch.bfloat16 and multiplies_bfloat16()
    chosen = [RUNS[i % 6], RUNS[(i + 3) % 6]][: 2 if fast else 1]
    most = max(count for _, count, _ in chosen)
    plain = run(engine_of(loaded, 8), prompts, most, speculate=False, **options())
    for budget, count, slots in chosen:
        drafted = run(engine_of(loaded, slots), prompts, count, budget=budget, **options())
        if budget not in (0, "auto"):
            assert sum(out.stats.nodes_accepted for out in drafted[0]) > 0
        assert_same_bits(drafted, plain)


def few_rows(x, weight, bias=None):
    """A library that adds up in another order from 12 rows on, and below row by row."""
    if x.shape[0] < 12:
        y = torch.stack([weight @ row for row in x])
    else:
        half = x.shape[1] // 2
        y = x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T
    return y if bias is None else y + bias


@pytest.mark.parametrize("kept", [True, False])
def test_it_needs_blocks_of_rows_where_products_differ(kept):
    loaded = loaded_of("llama", torch.float32)
    prompts = some_prompts((5,))
    engine = engine_of(loaded, 8)
    engine.decoder.linear = ExactProducts(few_rows) if kept else few_rows
    plain = run(engine, prompts, 4, speculate=False, **options(24))
    drafted = run(engine, prompts, 4, budget=64, **options(24))
    if kept:
        assert_same_bits(drafted, plain)
    else:
        with pytest.raises(AssertionError):
            assert_same_bits(drafted, plain)


def test_unsupported_options_are_refused():
    model = checkpoints.build("llama", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"exact must be False in torch\.float64, got True"):
        csd.Engine(model, exact=True)
    # loops do not read float16
    for dtype, kernels in ((torch.bfloat16, "reference"), (torch.float16, None)):
        model = checkpoints.build("llama", dtype=dtype)
        with pytest.raises(ValueError, match="exact must be False with kernels='reference', whose"):
            csd.Engine(model, kernels=kernels, exact=True)
        assert not csd.Engine(model, kernels=kernels).exact
    for exact in ("cublas", "blas"):
        with pytest.raises(ValueError, match=f"exact must be True.* or .*, got '{exact}'"):
            csd.Engine(loaded_of("llama", torch.float32), exact=exact)


def refused(product, weight):
    raise ValueError("exact must be False here")


@pytest.mark.parametrize(
    "dtype,found,taken",
    [
        (torch.bfloat16, lambda product, weight: RowBlocks(2, 32), True),
        (torch.bfloat16, lambda product, weight: RowBlocks(4, 256), False),
        (torch.bfloat16, lambda product, weight: RowBlocks(1, 16), False),
        (torch.bfloat16, refused, False),
        (torch.float32, lambda product, weight: RowBlocks(1, 256), False),
    ],
)
def test_it_is_the_default_where_it_is_free(monkeypatch, dtype, found, taken):
    monkeypatch.setattr("csd.models.exact_products.row_blocks", found)
    model = checkpoints.build("llama", dtype=dtype)
    assert csd.Engine(model).exact == taken
    assert not csd.Engine(model, exact=False).exact
