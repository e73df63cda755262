"""Training a stock transformers model on packed samples: gradients of one pass per sample."""

import pytest
import torch
import torch.nn.functional as F
from helpers.checks.precision import gradient_within_eager
from helpers.models import checkpoints
from helpers.targets import few
from test_tree_families import FAMILIES, build

import csd

PROMPTS = [[5, 17, 60, 3, 42, 8, 9, 33], [7, 4]]
COMPLETIONS = [[[11, 7, 8, 9], [11, 7, 30], [], [2, 50, 1, 1, 6]], [[11, 7, 8], [90, 13]]]
# additional families: windows, caps, sinks
MORE = {
    "mistral": dict(sliding_window=4),
    "gemma2": dict(head_dim=8, sliding_window=4, attn_logit_softcapping=3.0),
    "gemma3_text": dict(head_dim=8, sliding_window=4),
    "gpt_oss": dict(head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2),
    "llama4_text": dict(head_dim=8, attention_chunk_size=4, num_local_experts=2),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
}


def packed_loss(model, prompts=PROMPTS, completions=COMPLETIONS):
    """Sum of negative log-probabilities of all completions' tokens, from one packed pass."""
    packed = csd.PackedTree(prompts, completions)
    logits = model(**packed.inputs).logits[0]
    assert logits.shape[0] == len(packed.token)
    rows = [rows for samples in packed.rows for rows in samples]
    losses = [
        F.cross_entropy(logits[r[:-1]].double(), packed.token[r[1:]], reduction="sum") for r in rows
    ]
    return torch.stack(losses).sum()


def plain_loss(model, prompts=PROMPTS, completions=COMPLETIONS):
    """The same from one pass per sample."""
    total = torch.zeros((), dtype=torch.float64)
    for prompt, samples in zip(prompts, completions, strict=True):
        for tokens in samples:
            ids = torch.tensor([prompt + tokens])
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            target = ids[0, len(prompt) :]
            total = total + F.cross_entropy(logits.double(), target, reduction="sum")
    return total


def gradients(model, loss, **named):
    model.zero_grad()
    value = loss(model, **named)
    value.backward()
    return [value.detach()[None], *(p.grad for p in model.parameters() if p.grad is not None)]


def plain_gradients(model):
    """Gradients of plain passes with each of transformers' attentions."""
    found = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        found.append([x.clone() for x in gradients(model, plain_loss)])
    return found


def as_near(got, plain, exact, dtype):
    """Errors of each matrix and of the whole gradient are bounded by those of plain passes.

    plain: the gradients of transformers' attentions. The gradient of a key's bias is 0 but for the
    rotation, since a shift of all keys changes no weight: in so few numbers the error is that of
    single roundings.
    """
    tokens = sum(len(t) + 8 for samples in COMPLETIONS for t in samples)
    for x, want, *eager in zip(got, exact, *plain, strict=True):
        if want.dim() == 2:
            gradient_within_eager(x, eager, want, tokens, dtype)
    whole = [torch.cat([x.double().flatten() for x in of]) for of in (exact, got, *plain)]
    error, *theirs = ((x - whole[0]).norm() for x in whole[1:])
    assert error <= 1.5 * max(theirs), f"error {error:.2e}, of plain passes {max(theirs):.2e}"


def swapped(model):
    model.set_attn_implementation("csd_tree")
    return model


def small(family):
    """Prompts and completions within a vocabulary of 61."""
    clip = [[[t % 61 for t in tokens] for tokens in samples] for samples in COMPLETIONS]
    return dict(prompts=PROMPTS, completions=clip)


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "mistral"])
def test_gradients_in_float64_are_those_of_each_sample(family):
    model = checkpoints.build(family, dtype=torch.float64)
    want = gradients(model, plain_loss)
    got = gradients(swapped(model), packed_loss)
    # transformers computes norms and rotary tables in float32
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * y.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gradients_are_as_near_to_float64_as_those_of_plain_passes(family, dtype):
    model = checkpoints.build(family, dtype=dtype)
    wide = checkpoints.build(family, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    exact = gradients(wide, plain_loss)
    plain = plain_gradients(model)
    got = gradients(swapped(model), packed_loss)
    as_near(got, plain, exact, dtype)


def test_two_runs_have_equal_bits():
    model = swapped(checkpoints.build("llama"))
    first = [x.clone() for x in gradients(model, packed_loss)]
    assert all(torch.equal(x, y) for x, y in zip(first, gradients(model, packed_loss), strict=True))


def test_layers_may_be_computed_again():
    model = swapped(checkpoints.build("llama"))
    want = [x.clone() for x in gradients(model, packed_loss)]
    model.train()
    model.gradient_checkpointing_enable()
    for x, y in zip(gradients(model, packed_loss), want, strict=True):
        assert torch.equal(x, y)


def test_under_autocast():
    """Errors are those of plain passes under autocast."""
    model = checkpoints.build("llama")
    exact = gradients(checkpoints.build("llama", dtype=torch.float64), plain_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = plain_gradients(model)
        got = gradients(swapped(model), packed_loss)
    as_near(got, plain, exact, torch.bfloat16)


# families that have layers of another kind than attention, or whose windows only their masks have
REFUSED = {
    "bert": "is_causal must be True to train on packed samples, got False",
    "lfm2": "layer_types must be full_attention or sliding_attention to train on .* got 'conv'",
    "falcon_h1": "must have no layers with a state|layer_types must be",
    "minimax": "layer_types must be",
    "llama4_text": "layer_types must be|make their own masks",
}


@few(6)
@pytest.mark.parametrize("family", sorted(FAMILIES | MORE))
def test_a_family_trains_or_is_refused(family, monkeypatch):
    monkeypatch.setitem(FAMILIES, family, MORE.get(family) or FAMILIES[family])
    model = build(family)
    case = small(family)
    want = gradients(model, plain_loss, **case)
    try:
        got = gradients(swapped(model), packed_loss, **case)
    except (ValueError, TypeError, RuntimeError) as error:
        assert family not in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_oss", "mixtral")
        assert len(str(error)) > 20
        return
    assert family not in REFUSED
    if family == "falcon":
        # a model that has only its own attention
        assert got[0].isnan()
        return
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * max(1, y.abs().max().item()))


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_mix_samples_are_refused_by_name(family, monkeypatch):
    monkeypatch.setitem(FAMILIES, family, MORE.get(family) or FAMILIES[family])
    model = swapped(build(family))
    with pytest.raises(ValueError, match=REFUSED[family]):
        packed_loss(model, **small(family))


def test_errors():
    model = swapped(checkpoints.build("llama", attention_dropout=0.5)).train()
    packed = csd.PackedTree(PROMPTS, COMPLETIONS)
    with pytest.raises(ValueError, match=r"dropout must be 0 for tree attention, got 0.5"):
        model(**packed.inputs)
    model.eval()
    with pytest.raises(ValueError, match=r"input_ids must be one row of the \d+ packed tokens"):
        model(**packed.inputs | {"input_ids": packed.token[None, :3], "position_ids": None})
