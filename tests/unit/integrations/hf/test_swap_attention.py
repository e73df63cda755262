"""`csd_tree` in stock transformers models: sdpa without a tree, csd's kernel with one."""

import importlib
import subprocess
import sys

import pytest
import torch
from helpers.checks.precision import within_eager
from helpers.examples_main import main_of
from helpers.models import checkpoints
from helpers.targets import few, slow
from swapped_trees import PARENTS, PROMPTS, SAMPLES, TOKENS, filled_cache, one_by_one, swapped

import csd
from csd.integrations.transformers import attention

pytestmark = pytest.mark.compiled

FAMILIES = ("llama", "llama3", "qwen2", "mistral", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_tree_equals_sdpa(family):
    ours, stock = swapped(family), checkpoints.build(family)
    assert stock.config._attn_implementation == "sdpa"
    ids = torch.randint(checkpoints.VOCAB, (3, 11), generator=torch.Generator().manual_seed(1))
    left, right = torch.ones(3, 11, dtype=torch.long), torch.ones(3, 11, dtype=torch.long)
    left[0, :4] = right[2, 7:] = 0
    with torch.no_grad():
        for mask in (None, left, right):
            pair = [m(ids, attention_mask=mask) for m in (ours, stock)]
            assert torch.equal(pair[0].logits, pair[1].logits)
        # one more token behind the padded ones, out of the cache
        mask = torch.cat([left, torch.ones(3, 1, dtype=torch.long)], 1)
        pair = [m(ids, attention_mask=left).past_key_values for m in (ours, stock)]
        more = [
            m(ids[:, :1], attention_mask=mask, past_key_values=past).logits
            for m, past in zip((ours, stock), pair, strict=True)
        ]
        assert torch.equal(*more)
        pair = [m.generate(ids, attention_mask=left, max_new_tokens=6) for m in (ours, stock)]
        assert torch.equal(*pair)


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_equals_every_path_alone(family):
    model, dense = swapped(family, torch.float64), checkpoints.build(family, dtype=torch.float64)
    cache = filled_cache(model, dense)
    tree = cache.tree(TOKENS, PARENTS)
    with torch.no_grad():
        logits = model(**tree.inputs).logits[0]
    assert logits.shape == (sum(map(len, TOKENS)), checkpoints.VOCAB)
    torch.testing.assert_close(logits, one_by_one(dense), rtol=1e-9, atol=1e-9)


@few(1)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tree_on_the_triton_kernel(family, poison):
    model, dense = swapped(family), checkpoints.build(family)
    tree = filled_cache(model, dense).tree(TOKENS, PARENTS, kernels="triton")
    with torch.no_grad():
        logits = model(**tree.inputs).logits[0]
        # a second pass over the same tree plans again
        again = model(**tree.inputs).logits[0]
    exact = one_by_one(checkpoints.build(family, dtype=torch.float64))
    within_eager(logits, one_by_one(dense), exact, model.config.intermediate_size)
    assert torch.equal(logits, again)


def random_tree(root, likely, generator):
    """A root, a right guess at depth 1 and 2 where it is known, and wrong ones around it."""
    wrong = torch.randint(checkpoints.VOCAB, (5,), generator=generator).tolist()
    tokens = [root, wrong[0], likely[0], wrong[1], likely[1], wrong[2]]
    return tokens, [-1, 0, 0, 1, 2, 4]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_greedy_decoding_by_trees_equals_generate(family):
    model, dense = swapped(family, torch.float64), checkpoints.build(family, dtype=torch.float64)
    dense.generation_config.eos_token_id = None
    want = []
    for p in PROMPTS:
        ids = dense.generate(torch.tensor([p]), max_new_tokens=20, do_sample=False)
        want.append(ids[0, len(p) :].tolist())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        prefill = [model(torch.tensor([p[:-1]])).past_key_values for p in PROMPTS]
        cache = csd.TreeCache(prefill, SAMPLES, max_new_tokens=24)
        group = [g for g, n in enumerate(SAMPLES) for _ in range(n)]
        out, steps = [[] for _ in group], 0
        while min(map(len, out)) < 20:
            trees = [
                random_tree(
                    (PROMPTS[g] + out[s])[-1], (want[g] + [0, 0, 0, 0])[len(out[s]) :], generator
                )
                for s, g in enumerate(group)
            ]
            # slots that have all their tokens sit out
            trees = [t if len(out[s]) < 20 else ([], []) for s, t in enumerate(trees)]
            tree = cache.tree(*(list(x) for x in zip(*trees, strict=True)))
            sample = model(**tree.inputs).logits[0].argmax(-1)
            paths = tree.accepted(sample)
            for s, chosen in enumerate(paths):
                out[s] += [int(sample[int(tree.slot_start[s]) + j]) for j in chosen]
            cache.commit(tree, paths)
            steps += 1
    assert [o[:20] for o in out] == [want[g] for g in group]
    # three tokens a step where the guess was right
    assert steps < 10
    assert cache.slot_len.tolist() == [len(o) for o in out]


def test_accepted_follows_one_path():
    model, dense = swapped("llama"), checkpoints.build("llama")
    tree = filled_cache(model, dense).tree(TOKENS, PARENTS)
    with pytest.raises(RuntimeError, match="must call attention in 2 layers"):
        tree.accepted(tree.token)
    with torch.no_grad():
        model(**tree.inputs)
    sample = [8, 9, 7, 0, 0, 9, 3, 50, 14, 15, 0, 0, 0, 61]
    # the 7 that node 2 drew is node 5, not node 1
    assert tree.accepted(torch.tensor(sample)) == [[0, 2, 5], [0], [], [0], [0]]
    sample[2], sample[8:10] = 30, [13, 15]
    assert tree.accepted(torch.tensor(sample)) == [[0, 2], [0], [], [0, 1, 3], [0]]
    sample[0] = 7
    assert tree.accepted(torch.tensor(sample)) == [[0, 1, 3], [0], [], [0, 1, 3], [0]]


def test_64_nodes_and_the_sign_bit():
    model, dense = swapped("llama"), checkpoints.build("llama")
    right = checkpoints.build("llama", dtype=torch.float64)
    with torch.no_grad():
        cache = csd.TreeCache([model(torch.tensor([[5, 6]])).past_key_values], [1], 100)
        chain = [(3 * j) % checkpoints.VOCAB for j in range(64)]
        tree = cache.tree([chain], [list(range(-1, 63))])
        assert tree.ancestors[-1] == -1
        logits = model(**tree.inputs).logits[0]
        want, exact = (m(torch.tensor([[5, 6, *chain]])).logits[0, 2:] for m in (dense, right))
    within_eager(logits, want, exact, model.config.intermediate_size)
    sample = torch.tensor([*chain[1:], 0])
    assert tree.accepted(sample) == [list(range(64))]


ORDERS = {
    "csd-first": """
import csd, sys
assert not any(name.startswith("transformers") for name in sys.modules)
import transformers
""",
    "csd-last": """
import sys, transformers.models.llama.modeling_llama
import csd
csd.register_attention()
""",
}
CHECK = """
config = transformers.LlamaConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="csd_tree")
model.set_attn_implementation("sdpa")
model.set_attn_implementation("csd_tree")
assert model.config._attn_implementation == "csd_tree"
assert not any("csd" in type(finder).__module__ for finder in sys.meta_path)
"""


@slow
@pytest.mark.parametrize("order", ORDERS)
def test_registered_in_any_order_of_imports(order):
    subprocess.run([sys.executable, "-c", ORDERS[order] + CHECK], check=True)


def test_registered_once_the_models_are_imported(tmp_path, monkeypatch):
    """The hook acts once, behind the import of a module in the place of transformers' models."""
    registered = []
    (tmp_path / "models_of_a_test.py").write_text("ready = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(attention, "MODELS", "models_of_a_test")
    monkeypatch.setattr(
        attention,
        "register_attention",
        lambda: registered.append(sys.modules["models_of_a_test"].ready),
    )
    finders = [*sys.meta_path]
    attention.register_when_imported()
    attention.register_when_imported()
    assert len(sys.meta_path) == len(finders) + 1
    assert not registered
    importlib.import_module("models_of_a_test")
    assert registered == [True] and sys.meta_path == finders
    # csd is the last
    attention.register_when_imported()
    assert registered == [True, True] and sys.meta_path == finders
    del sys.modules["models_of_a_test"]


@torch.no_grad()
def test_under_autocast():
    model, dense = swapped("llama"), checkpoints.build("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tree = filled_cache(model, dense).tree(TOKENS, PARENTS)
        got, narrow = model(**tree.inputs).logits[0].float(), one_by_one(dense).float()
    exact = one_by_one(checkpoints.build("llama", dtype=torch.float64))
    assert (got - exact).abs().max() <= 2 * (narrow - exact).abs().max()


def test_example(capsys):
    texts, plain = main_of("swap_attention.py")()
    assert texts == plain
    assert "equal to plain decoding: 4 of 4" in capsys.readouterr().out


def test_generate_reads_a_swapped_model():
    out = [
        csd.generate(m, [3, 4, 5], num_samples=3, max_new_tokens=8, seed=0).tokens
        for m in (swapped("qwen2"), checkpoints.build("qwen2"))
    ]
    assert out[0] == out[1]


def test_errors():
    model, dense = swapped("llama"), checkpoints.build("llama")
    cache = filled_cache(model, dense)
    tree = cache.tree(TOKENS, PARENTS)
    past = dense(torch.tensor([PROMPTS[0]])).past_key_values
    other = dense(torch.tensor([PROMPTS[0]])).past_key_values
    inputs = dict(tree.inputs)
    with pytest.raises(RuntimeError, match=r"no backward: call the model under torch\.no_grad"):
        model(**inputs)
    mistral = checkpoints.build("mistral", sliding_window=32)
    mistral.set_attn_implementation("csd_tree")
    calls = [
        (lambda: model(**inputs | {"past_key_values": past}), "do not pass past_key_values"),
        (
            lambda: model(torch.zeros(2, 3, dtype=torch.long), tree=tree),
            r"one row of the tree's 14 tokens, got 2 of 3",
        ),
        (lambda: mistral(**inputs), "sliding_window must be None for tree attention, got 32"),
        (lambda: cache.tree(TOKENS[:2], PARENTS), "must have 5 lists, got 2 and 5"),
        (lambda: cache.tree([[1, 2], *TOKENS[1:]], PARENTS), "slot 0 .* got 2 and 6"),
        (
            lambda: cache.tree(TOKENS, [*PARENTS[:3], [-1, 0, 3, 1, 0], [-1]]),
            "the parent of node 2 of slot 3 must be a node before it, 0 to 1, got 3",
        ),
        (lambda: cache.tree(TOKENS, [*PARENTS[:4], [0]]), "node 0 of slot 4 must be -1, got 0"),
        (lambda: cache.tree([[1] * 65, [], [], [], []], [[]] * 5), "at most 64 tokens"),
        (lambda: cache.append(1, other), "slot 1 has room for 80 tokens, got 142"),
        (lambda: cache.tree(TOKENS, PARENTS, kernels="fast"), "'cpu' or 'triton', got 'fast"),
        (lambda: csd.TreeCache([other], [1, 2], 3), "one number per prompt, got 2 for 1"),
        (lambda: csd.TreeCache([other], [0], 3), "samples must be at least 1, got 0"),
        (lambda: csd.TreeCache([[]], [1], 3), "a key and a value"),
    ]
    for call, message in calls:
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            call()
    parts = {f: getattr(tree, f) for f in csd.Tree.__slots__ if f != "_work"}
    with pytest.raises(ValueError, match=r"slot_start must have shape \(5,\), got \(4,\)"):
        csd.Tree(**parts | {"slot_start": tree.slot_start[:4]})
    with pytest.raises(ValueError, match=r"ancestors must be torch.int64, got torch.int32"):
        csd.Tree(**parts | {"ancestors": tree.ancestors.int()})
    for name in ("slot", "slot_len", "prompt_len", "slot_nodes"):
        apart = torch.stack([parts[name]] * 2, -1)[..., 0]
        with pytest.raises(ValueError, match=f"{name} must be contiguous, got strides"):
            csd.Tree(**parts | {name: apart})
    with pytest.raises(ValueError, match=r"v_pages must be torch.float32, got torch.float16"):
        csd.Tree(**parts | {"v_pages": tree.v_pages.half()})
    with pytest.raises(ValueError, match="slot_pages must be on cpu, got meta"):
        csd.Tree(**parts | {"slot_pages": tree.slot_pages.to("meta")})


@torch.no_grad()
def test_changes_of_a_tree_after_construction_are_checked():
    """The first layer checks what all share, each layer its own."""
    model, dense = swapped("llama"), checkpoints.build("llama")
    tree = filled_cache(model, dense).tree(TOKENS, PARENTS)
    _, M, K, D = tree.node_k.shape
    for layer in (0, 1):
        q, k = torch.zeros(1, 2 * K, M, D), torch.zeros(1, K, M, D)
        assert tree.attend(layer, q, k, k, 1.0).shape == (1, M, 2 * K, D)
        for bad, message in (
            (q.half(), "node_k must be torch.float16, got torch.float32"),
            (q[:, : 2 * K - 1], f"H must be 1 to 64 times K, got H={2 * K - 1}, K={K}"),
            (q[..., 1:], rf"node_k must have shape \({M}, {K}, {D - 1}\), got"),
        ):
            with pytest.raises(ValueError, match=message):
                tree.attend(layer, bad, k, k, 1.0)
    tree.slot_start = tree.slot_start[:4]
    with pytest.raises(ValueError, match=r"slot_start must have shape \(5,\), got \(4,\)"):
        model(**tree.inputs)
