"""Flat rows as a CPU's loop: the tokens of `verify_ref` for any head and any place of a cut."""

import pytest
import torch
from decide_cases import no_reference
from helpers.models.checkpoints import build
from helpers.targets import few, slow

pytest.importorskip("numba")

import csd
from csd.kernels.numba.jit import loop
from csd.kernels.verify import verify_ref
from csd.kernels.verify.advance_slots import mark_seen
from csd.kernels.verify.cpu import path
from csd.kernels.verify.cpu.cuts import boundary
from csd.kernels.verify.token_logprobs import filtered_ref
from csd.state.pool_builder import roots
from csd.state.slots import Slots

OPTIONS = {
    "none": {},
    "top-k": dict(top_k=50),
    "long top-k": dict(top_k=2000),
    "top-p": dict(top_p=0.95),
    "top-p below the head": dict(top_p=0.99999),
    "min-p": dict(min_p=0.05),
    "min-p below the head": dict(min_p=1e-6),
    "typical": dict(typical_p=0.9),
    "typical below the head": dict(typical_p=0.9999),
    "penalty": dict(repetition_penalty=1.1),
    "top-k and top-p": dict(top_k=3000, top_p=0.9),
    "top-k and typical": dict(top_k=3000, typical_p=0.97),
    "top-p and typical": dict(top_p=0.97, typical_p=0.9),
    "all": dict(top_k=5000, top_p=0.97, min_p=1e-4, typical_p=0.95, repetition_penalty=1.2),
}
ROWS = 6


def case(seed, vocab, dtype, options):
    """Rows from sharp to flat, of temperatures from 1 to 2."""
    g = torch.Generator().manual_seed(seed)
    slots = Slots.empty(ROWS, vocab, 30, 4)
    slots.live[:], slots.group[:], slots.max_new[:] = True, 0, 30
    slots.sample[:], slots.key[:] = torch.arange(ROWS), seed
    slots.context[:, 0] = 7
    slots.temperature[:] = 1 + torch.rand(ROWS, generator=g)
    for name, value in options.items():
        getattr(slots, name)[:] = value
    mark_seen(slots.seen, torch.randint(vocab, (ROWS, 200), generator=g))
    logits = torch.randn(ROWS, vocab, generator=g) * torch.linspace(0.4, 5, ROWS)[:, None]
    logits[:, :20] += torch.rand(ROWS, 20, generator=g) * 12
    return logits.to(dtype), roots(slots, ROWS), slots


def assert_draws(seed, vocab, dtype, options):
    logits, pool, slots = case(seed, vocab, dtype, options)
    got, want = path.verify_all(logits, pool, slots), verify_ref(logits, pool, slots)
    assert torch.equal(got.sample, want.sample)
    assert torch.equal(got.top_token, want.top_token)
    torch.testing.assert_close(got.logprob, want.logprob, rtol=1e-5, atol=3e-5)
    given = path.token_logprobs(logits, pool, slots, torch.arange(ROWS), got.sample.long())
    assert torch.equal(given.logprob, got.logprob) and not given.bad.any()


@few(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [4099, 32003, 49152, 151936])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_filter_of_flat_rows(options, vocab, dtype):
    assert_draws(1, vocab, dtype, options)


@slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_many_flat_rows(options):
    for seed in range(2, 60):
        assert_draws(seed, (4099, 32003, 50257)[seed % 3], torch.float64, options)


@few(4)
@pytest.mark.parametrize("vocab", [4099, 32003])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_probabilities_after_the_filters(options, vocab):
    for dtype in (torch.float32, torch.float64):
        logits, _, slots = case(4, vocab, dtype, options)
        got, want = path.filtered(logits, slots), filtered_ref(logits, slots)
        assert torch.equal(got > 0, want > 0)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


@loop
def places(value, mass, low, high, start, total, limits, out):
    for i in range(limits.shape[0]):
        out[i] = boundary(value, mass, low, high, start, total, limits[i])[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "wide", "one bucket", "signed zeros"])
def test_the_place_of_a_cut_is_that_of_a_sort(kind, dtype):
    """Sums of whole numbers are exact in any order, so each place is determined."""
    g, n = torch.Generator().manual_seed(3), 3000
    value = torch.randn(n, generator=g, dtype=torch.float64) * 4 - 6
    if kind == "ties":
        value = value.round()
    if kind == "wide":
        value *= 1e6
    if kind == "one bucket":
        value = value * 1e-5 - 3
    if kind == "signed zeros":
        value = value.sign() * 0
    value = value.to(dtype)
    mass = torch.randint(1, 5, (n,), generator=g).to(dtype)
    for low, high in ((-11.1, torch.inf), (-1e30, -11.1), (-7.0, -2.0), (-1e30, torch.inf)):
        inside = (value >= low) & (value < high)
        if not inside.any():
            continue
        start = torch.tensor(40, dtype=dtype)
        total = mass[inside].sum() + start
        limits = torch.linspace(float(start / total), 1.1, 60).to(dtype)
        got = torch.full((60,), -1)
        edges = torch.tensor([low, high], dtype=dtype).numpy()
        arrays = value.numpy(), mass.numpy(), *edges, start.numpy()[()], total.numpy()[()]
        places(*arrays, limits.numpy(), got.numpy())
        order = value.masked_fill(~inside, torch.inf).sort(stable=True).indices[: inside.sum()]
        below = (start + mass[order].cumsum(0)) / total
        want = (below[:, None] <= limits).sum(0).clamp(max=len(order) - 1)
        assert torch.equal(got, order[want])


DRAWN = {k: OPTIONS[k] for k in OPTIONS if k != "penalty"} | {
    "penalty": dict(repetition_penalty=1.1),
    "counts": dict(frequency_penalty=0.3),
}


@pytest.fixture(scope="module")
def flat():
    """A model whose rows have long heads at temperature 2, and its engine."""
    model = build("llama", vocab_size=5003)
    with csd.Engine(model, max_slots=4) as engine:
        if "decide" not in engine.ops.fused:
            pytest.skip("an engine on this CPU runs no loops")
        yield model, engine


@few(4)
@pytest.mark.parametrize("options", DRAWN.values(), ids=DRAWN)
def test_no_step_runs_the_reference(flat, options):
    """Drawn, scored and trained tokens: loops compute all rows, and the gradient's."""
    model, engine = flat
    how = dict(temperature=2.0, **options)
    with no_reference():
        out = csd.generate(
            engine, [5, 6, 7], num_samples=4, seed=1, max_new_tokens=12, ignore_eos=True, **how
        )
        given = [x.tokens for x in out]
        scored = csd.score(engine, [5, 6, 7], given, **how)
        trained = csd.logprobs(model, [5, 6, 7], given, **how)
        sum(x.sum() for x in trained.logprobs).backward()
    for a, b, c in zip(scored, out, trained.logprobs, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert c.tolist() == pytest.approx(b.logprobs, abs=1e-4)
