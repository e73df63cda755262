"""Families whose differences from Llama are data of the fused decoder."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.models.families import WINDOW, build, convert
from helpers.runs.module_draws import PROMPT, TOKENS, plain
from helpers.targets import few, slow

import csd
from csd.models.fused.fuse import is_fused
from csd.models.load import load

# the families of tests/helpers/models/families.py that differ from Llama, and these of its names
FUSED = (
    "smollm3",
    "granite",
    "qwen3_moe",
    "phi3",
    "phi3 partial",
    "phi3 longrope",
    "olmo2",
    "mistral",
    "phi3 window",
    "qwen2 window",
    "qwen3 window",
    "olmo3",
    "olmo3 yarn",
    "gemma2",
    "gemma3_text",
)
WINDOWED = ("mistral", "qwen2 window", "olmo3", "gemma2")
IN_EACH_RUN = ("olmo3", "reference"), ("gemma2", "triton")
BACKENDS = [
    pytest.param(*case, marks=() if case in IN_EACH_RUN else slow, id=" ".join(case))
    for case in itertools.product(WINDOWED, ("reference", "triton"))
]


def each(*few):
    """Families of each run; the others take a long one."""
    return [pytest.param(name, marks=() if name in few else slow, id=name) for name in FUSED]


SAMPLING = (dict(temperature=0.7, top_p=0.95), dict(temperature=0))


def drawn(engine, budget=16, **params):
    fixed = dict(num_samples=2, seed=4, max_new_tokens=TOKENS, end_token_ids=[])
    return engine.generate(PROMPT, budget=budget, **fixed | params)


@few(3)
@pytest.mark.parametrize(
    "name",
    each(
        "smollm3",
        "granite",
        "qwen3_moe",
        "phi3 longrope",
        "mistral",
        "olmo3 yarn",
        "gemma2",
        "gemma3_text",
    ),
)
def test_its_tokens_are_plain_samplings(name):
    model = build(name)
    engine = csd.Engine(model, prefill_chunk=8)
    assert engine.decoder.name == "fused"
    for params in SAMPLING:
        want = plain(model, **params)
        for budget in (0, 16):
            out = drawn(engine, budget, **params)
            assert out.tokens == [tokens for tokens, *_ in want]
            for sample, (_, logprobs, raw, _) in zip(out, want, strict=True):
                assert sample.logprobs == pytest.approx(logprobs, abs=2e-5)
                assert sample.raw_logprobs == pytest.approx(raw, abs=2e-5)


@few(3)
@pytest.mark.parametrize("name", each("smollm3", "qwen3_moe", "gemma2", "olmo3"))
def test_it_draws_by_default(name):
    """In the dtype of loops, with the number of drafts that measured steps decide."""
    with csd.Engine(build(name, torch.float32)) as engine:
        assert drawn(engine, "auto").tokens == drawn(engine, 0).tokens


# what a decoder without the property would compute
LEFT_OUT = {
    "no rotary in all layers": ("smollm3", dict(rotated=None)),
    "another scale": ("granite", dict(scale=None)),
    "embeddings as they are": ("granite", dict(embedding_scale=1.0)),
    "the residual as it is": ("granite", dict(residual_scale=1.0)),
    "logits as they are": ("granite", dict(logit_divisor=1.0)),
    "no window": ("mistral", dict(window=None)),
    "a window of one key less": ("mistral", dict(window=WINDOW - 1)),
    "windows in all layers": ("olmo3", dict(local=(True, True, True))),
    "one rotary embedding": ("gemma3_text", dict(local=None)),
    "no cap on scores": ("gemma2", dict(softcap=None)),
    "no cap on logits": ("gemma2", dict(final_cap=None)),
    "norms around 0": ("gemma2", dict(plus_one=False)),
    "SiLU": ("gemma2", dict(gelu=False)),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_tokens_depend_on_the_property(case):
    name, change = LEFT_OUT[case]
    model = build(name)
    loaded = load(model)
    loaded.decoder.config = loaded.config = replace(loaded.config, **change)
    loaded.module = None
    want = plain(model, temperature=0.7)
    got = drawn(csd.Engine(loaded), 0, temperature=0.7)
    # of the first tokens, which have the same prompt before them
    off = [abs(s.raw_logprobs[0] - raw[0]) for s, (_, _, raw, _) in zip(got, want, strict=True)]
    assert max(off) > 1e-3


@pytest.mark.parametrize("change", [dict(per_token=1), dict(sum_to_one=False)], ids=str)
def test_tokens_depend_on_the_experts(change):
    model = build("qwen3_moe")
    engine = csd.Engine(model)
    for layer in engine.decoder.layers:
        layer.experts = replace(layer.experts, **change)
    want = [tokens for tokens, *_ in plain(model, temperature=0.7)]
    assert drawn(engine, 0, temperature=0.7).tokens != want


@pytest.mark.parametrize("name", each("granite", "qwen3_moe", "olmo3", "gemma2"))
def test_log_probabilities_in_bfloat16(name):
    """No farther from a float64 run than twice the module's own forward, over the same text."""
    model = build(name, torch.bfloat16)
    out = drawn(csd.Engine(model), 8, temperature=1.0, num_samples=8, max_new_tokens=12)
    wide = convert(copy.deepcopy(model), torch.float64)
    off = {"csd": [], "own": []}
    for sample in out:
        own, exact = (forward(m, sample.tokens) for m in (model, wide))
        off["csd"].append((torch.tensor(sample.logprobs, dtype=torch.float64) - exact).abs())
        off["own"].append((own - exact).abs())
    # another expert is no rounding of its own
    middle = {side: torch.cat(found).median() for side, found in off.items()}
    assert middle["csd"] <= 2 * middle["own"]


@torch.no_grad()
def forward(model, tokens):
    logits = model(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return logits.double().log_softmax(-1)[torch.arange(len(tokens)), tokens]


@few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", each("qwen3_moe", "olmo3", "gemma2"))
def test_an_exact_engine_has_the_same_bits_whatever_is_drafted(name, dtype):
    engine = csd.Engine(build(name, dtype), exact=True)
    found = [drawn(engine, budget, temperature=0.7) for budget in (0, 4, 16)]
    assert found[0].logprobs == found[1].logprobs == found[2].logprobs
    assert found[2].stats.nodes_proposed > 0


@pytest.mark.parametrize("name", each("qwen3_moe", "phi3", "gemma2"))
def test_any_replaced_parameter_is_noticed(name):
    model = build(name)
    loaded = load(model)
    for part, weight in model.named_parameters():
        assert is_fused(model, loaded.decoder)
        weight.data = weight.data.clone()
        assert loaded.refresh(), part
        assert not loaded.refresh(), part


@slow
@pytest.mark.parametrize(("name", "kernels"), BACKENDS)
def test_a_window_in_other_backends(name, kernels):
    """The steps of a GPU have a fixed shape; drafts lie beyond the window of their root."""
    dtype = torch.float32 if kernels == "triton" else torch.float64
    model = build(name, dtype, **TWO_LAYERS[name])
    want = [tokens for tokens, *_ in plain(model, temperature=0.7)]
    with csd.Engine(model, kernels=kernels, static=kernels == "triton") as engine:
        assert drawn(engine, 16, temperature=0.7).tokens == want


# kernels of a GPU are interpreted
TWO_LAYERS = {
    name: dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    for name in ("qwen2 window", "olmo3", "gemma2")
} | {"mistral": dict(num_hidden_layers=1)}


def test_pages_behind_every_window_are_used_again():
    """A long sample in the memory of its last tokens: what was overwritten was out of reach."""
    model = build("mistral", max_position_embeddings=512)
    with csd.Engine(model, prefill_chunk=8, prefix_cache=False) as engine:
        assert engine.decoder.config.reach == WINDOW
        out = engine.generate(
            PROMPT * 4,
            num_samples=2,
            seed=4,
            max_new_tokens=140,
            budget=16,
            end_token_ids=[],
            temperature=0.7,
        )
        # of prompt and samples: a row sees 9 keys, and a chunk of a prompt has 8 more
        assert engine.caches.step.cache.pages == 2 * 1 + 1
    whole = csd.Engine(build("mistral", max_position_embeddings=512), drafter=csd.DraftModel(model))
    kept = whole.generate(
        PROMPT * 4,
        num_samples=2,
        seed=4,
        max_new_tokens=140,
        budget=16,
        end_token_ids=[],
        temperature=0.7,
    )
    assert whole.caches.step.cache.pages > 3
    assert out.tokens == kept.tokens


def test_a_draft_model_with_windows_drafts_as_it_draws():
    model = build("olmo3")
    with csd.Engine(model) as engine:
        plainly = drawn(engine, 0, temperature=0)
        drafted = drawn(engine, 8, temperature=0, drafter=csd.DraftModel(model, k=1, depth=4))
    assert drafted.tokens == plainly.tokens
    # the target's own tokens at temperature 0 are the draft model's, if it sees the same keys
    stats = drafted.stats
    assert stats.nodes_accepted == stats.nodes_proposed > 0


def test_a_text_ends_where_longrope_takes_other_frequencies():
    model = build("phi3 longrope")
    with csd.Engine(model) as engine:
        assert engine.decoder.config.context == 32
        with pytest.raises(ValueError, match="32"):
            drawn(engine, max_new_tokens=13)
        want = drawn(engine, 0, temperature=0.7).tokens
        # a long text leaves the module's other frequencies behind
        with torch.no_grad():
            model(torch.tensor([PROMPT * 2]))
        assert drawn(engine, 0, temperature=0.7).tokens == want


def test_experts_of_a_captured_step_are_those_of_the_loop():
    """The grouped product, which a GPU runs, beside the products of a CPU one by one."""
    torch.manual_seed(0)
    experts = load(build("qwen3_moe", torch.bfloat16)).decoder.layers[0].experts
    x = torch.randn(13, 32, dtype=torch.bfloat16)
    ops, linear = csd.Engine(build("llama", torch.bfloat16)).ops, torch.nn.functional.linear
    chosen = experts.routed(linear(x, experts.router))[1]
    one, grouped = (
        run(linear, ops.swiglu, x, chosen) for run in (experts._one_by_one, experts._grouped)
    )
    exact = replace(
        experts, **{name: getattr(experts, name).double() for name in ("router", "gate_up", "down")}
    )._one_by_one(linear, wide_swiglu, x.double(), chosen)
    assert (grouped - exact).abs().max() <= 2 * (one - exact).abs().max()
    with NoHostReads():
        experts._grouped(linear, ops.swiglu, x, experts.routed(linear(x, experts.router))[1])
    # another order of the experts is another result
    other = experts._grouped(linear, ops.swiglu, x, chosen.flip(-1))
    assert not torch.equal(other, grouped)


def wide_swiglu(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
