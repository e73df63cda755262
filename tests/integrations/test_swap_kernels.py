"""`csd.apply_kernels` on stock transformers models, and the backward of what it swaps in."""

import copy
import pickle
from importlib import import_module

import checkpoints
import pytest
import torch
import transformers
from precision import within_eager
from torch.autograd import gradcheck

import csd
from csd.integrations import swap
from csd.kernels.rms_norm import rms_norm, rms_norm_ref
from csd.kernels.rotary import rotary
from csd.kernels.rotate import rotate, rotate_ref, rotate_triton
from csd.kernels.swiglu import silu_mul, silu_mul_ref, silu_mul_triton, swiglu, swiglu_ref
from csd.kernels.tree_attention import tree_attention

norms = import_module("csd.kernels.rms_norm")
rotations = import_module("csd.kernels.rotate")
gates = import_module("csd.kernels.swiglu")

FAMILIES = pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
IDS = torch.randint(checkpoints.VOCAB, (3, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.ones(3, 9, dtype=torch.long)
MASK[1, :4] = 0


def logits(model):
    with torch.no_grad():
        return model(IDS, attention_mask=MASK).logits


@pytest.fixture
def calls(monkeypatch):
    """Counts of the kernels' runs, taken where the model calls them."""
    count = dict.fromkeys(("rms_norm", "rotate", "silu_mul"), 0)

    def counted(name, op):
        def call(*args):
            count[name] += 1
            return op(*args)

        return call

    for name in count:
        monkeypatch.setattr(swap, name, counted(name, getattr(swap, name)))
    return count


@FAMILIES
def test_applied_and_taken_off(family, calls):
    # in float64 a CPU runs the references, which compute what transformers does, one by one
    model = checkpoints.build(family, dtype=torch.float64)
    before = logits(model)
    assert csd.apply_kernels(model) is True
    assert torch.equal(logits(model), before)
    layers = model.config.num_hidden_layers
    norms_a_layer = 4 if family == "qwen3" else 2
    expected = dict(rms_norm=norms_a_layer * layers + 1, rotate=layers, silu_mul=layers)
    assert calls == expected
    # to apply them again is to have them
    assert csd.apply_kernels(model) is True
    assert torch.equal(logits(model), before)
    assert calls == {name: 2 * times for name, times in expected.items()}
    assert csd.remove_kernels(model) is True
    assert csd.remove_kernels(model) is False
    assert torch.equal(logits(model), before)
    assert calls == {name: 2 * times for name, times in expected.items()}
    assert not any("forward" in vars(m) for m in model.modules())


@FAMILIES
def test_triton_kernels_within_the_error_of_the_dtype(family, monkeypatch, poison):
    model, exact = checkpoints.build(family), logits(checkpoints.build(family, dtype=torch.float64))
    eager = logits(model)
    monkeypatch.setattr(
        swap, "rms_norm", lambda *a: norms.rms_norm_triton(*(x.contiguous() for x in a[:2]), a[2])
    )
    monkeypatch.setattr(swap, "rotate", rotations.rotate_triton)
    monkeypatch.setattr(swap, "silu_mul", gates.silu_mul_triton)
    assert csd.apply_kernels(model)
    within_eager(logits(model), eager, exact, model.config.intermediate_size)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_equal_stock(family):
    model = checkpoints.build(family)
    ours, exact = copy.deepcopy(model), checkpoints.build(family, dtype=torch.float64)
    assert csd.apply_kernels(ours)
    for m in (model, ours, exact):
        m(IDS, attention_mask=MASK, labels=IDS).loss.backward()
    for x in zip(*(m.named_parameters() for m in (ours, model, exact)), strict=True):
        got, want, right = (parameter.grad for _, parameter in x)
        assert want.abs().max() > 0, x[0][0]
        within_eager(got, want, right, max(IDS.numel(), model.config.intermediate_size))


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_trained_under_autocast(family, dtype):
    """Projections are narrow there, norms' weights and the rotary tables are not."""
    model = checkpoints.build(family)
    ours, exact = copy.deepcopy(model), checkpoints.build(family, dtype=torch.float64)
    assert csd.apply_kernels(ours)
    outs = [exact(IDS, attention_mask=MASK, labels=IDS)]
    outs[0].loss.backward()
    for m in (model, ours):
        with torch.autocast("cpu", dtype=dtype):
            outs.append(m(IDS, attention_mask=MASK, labels=IDS))
        outs[-1].loss.backward()
    assert outs[2].logits.dtype == outs[1].logits.dtype
    right, want, got = (out.logits for out in outs)
    within_eager(got, want, right, model.config.intermediate_size, dtype)
    for x in zip(*(m.parameters() for m in (ours, model, exact)), strict=True):
        within_eager(*(parameter.grad for parameter in x), 1, dtype)


def test_generate_works_before_and_after():
    model, other = (checkpoints.build("qwen2", dtype=torch.float64) for _ in range(2))
    options = dict(num_samples=3, max_new_tokens=10, temperature=0.8, seed=1)
    want = csd.generate(other, [5, 6, 7], **options).tokens
    before = logits(model)
    assert csd.apply_kernels(model)
    assert csd.generate(model, [5, 6, 7], **options).tokens == want
    # its weights are views of the engine's now, and the kernels stay
    assert torch.equal(logits(model), before)
    assert csd.remove_kernels(model) is True
    assert csd.apply_kernels(model) is True
    assert csd.generate(model, [5, 6, 7], **options).tokens == want


@FAMILIES
def test_a_swapped_model_is_saved_whole(family, calls):
    model = checkpoints.build(family, dtype=torch.float64)
    before = logits(model)
    assert csd.apply_kernels(model)
    packed = pickle.dumps(model)
    # as in a process that has swapped nothing
    swap._rotating.clear()
    other = pickle.loads(packed)
    assert sum(calls.values()) == 0
    assert torch.equal(logits(other), before)
    layers = model.config.num_hidden_layers
    assert calls["rotate"] == calls["silu_mul"] == layers < calls["rms_norm"]
    assert csd.remove_kernels(other) is True
    assert csd.remove_kernels(model) is True


def test_layers_that_came_later_are_swapped_too(calls):
    model, other = checkpoints.build("llama"), checkpoints.build("llama")
    assert csd.apply_kernels(model)
    before = logits(model)
    whole = dict(calls)
    model.model.layers[0] = other.model.layers[0]
    assert csd.apply_kernels(model) is True
    assert logits(model).shape == before.shape
    assert calls == {name: 2 * times for name, times in whole.items()}


def test_a_swapped_model_compiles_whole():
    model = checkpoints.build("llama")
    assert csd.apply_kernels(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        got, want = (m(IDS, use_cache=False).logits for m in (compiled, model))
    assert torch.equal(got, want)


def test_a_copy_of_a_swapped_model_is_its_own():
    model = checkpoints.build("llama")
    assert csd.apply_kernels(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    assert logits(model).abs().max() > 0 and logits(other).abs().max() == 0


def test_with_the_tree_attention():
    model = checkpoints.build("qwen3")
    before = logits(model)
    model.set_attn_implementation("csd_tree")
    assert csd.apply_kernels(model)
    with torch.no_grad():
        prefill = model(torch.tensor([[3, 4, 5]])).past_key_values
        tree = csd.TreeCache([prefill], [1], 8).tree([[6, 7, 8]], [[-1, 0, 1]])
        out = model(**tree.inputs).logits[0]
        want, exact = (
            checkpoints.build("qwen3", dtype=d)(torch.tensor([[3, 4, 5, 6, 7, 8]])).logits[0, 3:]
            for d in (torch.float32, torch.float64)
        )
    within_eager(out, want, exact, model.config.intermediate_size)
    right = logits(checkpoints.build("qwen3", dtype=torch.float64))
    within_eager(logits(model), before, right, model.config.intermediate_size)


def test_refused_models():
    gelu = checkpoints.build("llama", hidden_act="gelu")
    with pytest.raises(TypeError, match="hidden_act must be silu, got 'gelu'"):
        csd.apply_kernels(gelu)
    hooked = checkpoints.build("llama")
    hooked.model.norm.forward = hooked.model.norm.forward
    with pytest.raises(TypeError, match="a LlamaRMSNorm has a forward of its own already"):
        csd.apply_kernels(hooked)
    for model in (gelu, hooked):
        assert sum("forward" in vars(m) for m in model.modules()) == (model is hooked)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)
    with pytest.raises(TypeError, match=r"of Llama, Mistral, Qwen2, Qwen3 .* GPT2LMHeadModel"):
        csd.apply_kernels(transformers.GPT2LMHeadModel(config))


def leaf(*shape, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g, dtype=dtype).requires_grad_()


def test_gradcheck():
    cos, sin = leaf(3, 6).detach(), leaf(3, 6, seed=1).detach()
    assert gradcheck(rotate, (leaf(3, 4, 6), leaf(3, 2, 6), cos, sin))
    assert gradcheck(silu_mul, (leaf(2, 3, 5), leaf(2, 3, 5, seed=1)))
    assert gradcheck(swiglu, (leaf(2, 3, 10),))
    assert gradcheck(swiglu, (leaf(2, 3, 10), True))


def exact_norm(x, weight, eps, residual=None, *, plus_one=False):
    total = x if residual is None else x + residual
    return (weight + plus_one) * total / (total.pow(2).mean(-1, keepdim=True) + eps).sqrt(), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 33), (2, 3, 5, 8)], ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
def test_norm_gradients_are_as_near_as_those_of_the_reference(plus_one, shape, dtype):
    # gradcheck cannot: the statistics are float32 in any dtype
    grad, grad_sum = (
        leaf(*shape, seed=5).detach().to(dtype),
        leaf(*shape, seed=6).detach().to(dtype),
    )
    for residual in (False, True):
        found = []
        for norm in (rms_norm, rms_norm_ref, exact_norm):
            wide = torch.float64 if norm is exact_norm else dtype
            leaves = [leaf(*shape), leaf(shape[-1], seed=1), leaf(*shape, seed=2)]
            leaves = [x.detach().to(dtype).to(wide).requires_grad_() for x in leaves]
            x, weight, r = leaves
            y, total = norm(x, weight, 1e-5, r if residual else None, plus_one=plus_one)
            outs = (y, total) if residual else (y,)
            torch.autograd.backward(outs, [g.to(wide) for g in (grad, grad_sum)[: len(outs)]])
            found.append([x.grad for x in leaves[: 2 + residual]])
        for x in zip(*found, strict=True):
            within_eager(*x, leaf(*shape).numel())


@pytest.mark.parametrize("M,H,K,D", [(1, 1, 1, 2), (3, 9, 3, 64), (2, 14, 2, 96)])
def test_rotate_triton(M, H, K, D, poison):
    with torch.no_grad():
        args = [leaf(M, n, D, dtype=torch.float32) for n in (H, K)]
        args += [leaf(M, D, seed=n, dtype=torch.float32) for n in (1, 2)]
        exact = rotate_ref(*(x.double() for x in args))
        for x in zip(rotate_triton(*args), rotate_ref(*args), exact, strict=True):
            within_eager(*x, 2)
        # queries inside the row of a fused product
        fused = torch.cat([args[0], args[1]], dim=1)
        q, k = fused.split((H, K), dim=1)
        for x in zip(rotate_triton(q, k, *args[2:]), rotate_ref(*args), exact, strict=True):
            within_eager(*x, 2)


def test_silu_mul_triton(poison):
    with torch.no_grad():
        gate, up = leaf(3, 1030, dtype=torch.float32), leaf(3, 1030, seed=1, dtype=torch.float32)
        want = swiglu_ref(torch.cat([gate, up], -1))
        exact = swiglu_ref(torch.cat([gate, up], -1).double())
        within_eager(silu_mul_triton(gate, up), want, exact, 1)
        assert torch.equal(silu_mul(gate, up), silu_mul_ref(gate, up))


def test_operators():
    ops = torch.ops.csd
    x = leaf(3, 8, dtype=torch.float32)
    torch.library.opcheck(ops.silu_mul.default, (x, x))
    torch.library.opcheck(ops.rms_norm.default, (x, leaf(8, dtype=torch.float32), 1e-5))
    q, table = leaf(3, 4, 8, dtype=torch.float32), x.detach()
    torch.library.opcheck(ops.rotate.default, (q, q, table, table))


def test_errors():
    x, wide = torch.zeros(3, 4, 8), torch.zeros(3, 8)
    node = torch.zeros(3, 4, 8)
    position = torch.zeros(3, dtype=torch.int32)
    for call, message in (
        (
            lambda: silu_mul(wide, wide[:2]),
            r"up must have shape \(3, 8\), got \(2, 8\)",
        ),
        (lambda: silu_mul(wide.T, wide.T), "gate must be contiguous, got strides"),
        (lambda: rotate(x, x[:, :3], wide, wide), "H a multiple of K"),
        (lambda: rotate(x, x, wide.double(), wide), "cos must be torch.float32, got torch.float64"),
        (lambda: rotate(x, x, wide, wide[:, :6]), r"sin must have shape \(3, 8\), got \(3, 6\)"),
        (lambda: rotate(x.mT.contiguous().mT, x, wide, wide), "rows of q must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    learned = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="rotary has no backward"):
        rotary(learned, x, x, position, wide, wide, node, node.clone())
    with pytest.raises(RuntimeError, match="no gradient for cos and sin"):
        rotate(x, x, wide.clone().requires_grad_(), wide)
    with pytest.raises(RuntimeError, match="tree_attention has no backward"):
        tree_attention(learned, x, x, *[None] * 3, 1.0)
