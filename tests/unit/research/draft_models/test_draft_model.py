"""A draft model: same samples, drafts that a plain forward over the committed text would make."""

import pytest
import torch
from helpers.models.checkpoints import VOCAB as TINY
from helpers.models.checkpoints import build
from helpers.models.scripted import Letters, Near, PrefixSum, engine, loaded
from helpers.targets import few, slow

import csd
from csd.engine.step.budget import Budget
from csd.models.fused.fuse import fuse
from csd.research.draft_models.distributions import GRAPH, MODEL, Reliability
from csd.research.draft_models.draft_model import first_layers
from csd.research.draft_models.drafter import SlotTree, likeliest

PROMPTS = ["abcabc", "xyz", "q"]


def draft(decoder, **options):
    return csd.DraftModel(loaded(decoder), **options)


@few(2)
@pytest.mark.parametrize(("k", "depth"), [(1, 4), (3, 2), (1, 16)])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_target_itself_is_never_rejected(k, depth, temperature):
    """Every key and value decides; at temperature 1 the noise is the one that samples."""
    e = engine(PrefixSum(), Letters(), max_slots=4)
    options = dict(num_samples=2, max_new_tokens=70, seed=3, temperature=temperature)
    drafter = draft(PrefixSum(), k=k, depth=depth)
    out = csd.generate(e, PROMPTS, drafter=drafter, budget=200, **options)
    plain = csd.generate(e, PROMPTS, speculate=False, **options)
    assert [r.tokens for r in out] == [r.tokens for r in plain]
    steps = -(-70 // (depth + 1))
    assert [r.stats.sample_steps for r in out] == [2 * steps] * len(PROMPTS)
    assert all(r.stats.accepted["model"] == 2 * (70 - steps) for r in out)


def greedy_chain(model, prefix, depth):
    out = []
    for _ in range(depth):
        out.append(int(model.next_logits(prefix + out).argmax()))
    return out


@pytest.mark.parametrize("pause", [1, 3, 80])
def test_rejected_drafts_leave_no_trace(pause, monkeypatch):
    """Chains equal those of a forward over the committed text alone, however many steps drafted
    nothing in between and wherever a draft was rejected."""
    asked = [0]

    def ask(budget, live):
        asked[0] += 1
        return 0 if asked[0] % pause else budget.nodes

    monkeypatch.setattr(Budget, "num_draft_tokens", ask)
    e = engine(PrefixSum(), Letters(), max_slots=4)
    model, seen, kept = Near(), 0, set()
    out = csd.generate(
        e,
        PROMPTS,
        num_samples=2,
        # enough for several steps with drafts, and more than a page
        max_new_tokens=130 if pause == 80 else 70,
        seed=1,
        temperature=0,
        budget=40,
        drafter=draft(model, k=1, depth=4),
        drafts=True,
    )
    for result in out:
        for sample in result:
            for drafted in sample.drafts:
                if len(drafted.tokens) == 1:
                    continue
                text = result.prompt_ids + sample.tokens[: drafted.at]
                assert drafted.tokens[1:] == greedy_chain(model, text, len(drafted.tokens) - 1)
                seen += 1
                kept.add(len(drafted.path))
    # some were rejected at once, some later
    assert seen >= 3 and (pause > 1 or kept >= {0, 1})


def test_the_cache_is_that_of_the_committed_text():
    """Accepted tokens are kept, rejected ones are not, up to rounding."""
    target, model = build("qwen3", dtype=torch.float64), build("qwen3", dtype=torch.float64, seed=0)
    drafter = csd.DraftModel(model, layers=1, k=2, depth=4)
    e = csd.Engine(target)
    stream = e.stream(
        [5, 17, 3, 60],
        num_samples=2,
        max_new_tokens=40,
        budget=16,
        drafter=drafter,
        temperature=0.7,
        seed=2,
        ignore_eos=True,
    )
    first = next(stream)[1]
    cache = e.caches.drafter.prefill.cache
    # the other sample may have ended in the same step
    s = next(s for s, n in enumerate(cache.length) if n and cache._owner[s][1] == first.index)
    n = cache.length[s]
    ids = torch.tensor([5, 17, 3, 60, *first.tokens])
    plain = torch.zeros(1, len(ids), 2, 16, dtype=torch.float64)
    node_k, node_v = plain, plain.clone()
    from csd.kernels.ops import reference

    def attend(layer, q):
        return torch.zeros_like(q)

    small = first_layers(fuse(model), 1)
    small.forward(ids.int(), torch.arange(len(ids)).int(), attend, node_k, node_v, reference())
    places = cache.kv.slot_pages[s].long()
    k = cache.kv.k[0, places].flatten(0, 1)[:n]
    # the first layer's keys depend on token and place alone
    assert n >= 38 and (k - node_k[0, 3 : 3 + n]).abs().max() < 1e-12
    stream.close()


SETTINGS = {
    "greedy": dict(temperature=0),
    "sampled": dict(temperature=1.0),
    "cut": dict(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02),
    "penalty": dict(temperature=0.8, repetition_penalty=1.2, min_new_tokens=6),
}


@few(1)
@pytest.mark.parametrize("graph", [False, True], ids=["alone", "with the graph"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_are_plain_samplings(family, graph):
    model = build(family, dtype=torch.float64)
    e = csd.Engine(model)
    for setting in SETTINGS.values():
        options = dict(num_samples=3, max_new_tokens=18, seed=7, stop_token_ids=[7, 30]) | setting
        plain = csd.generate(e, [5, 17, 3, 60, 17, 3, 9], speculate=False, **options)
        for k, budget in ((1, 6), (4, 60)):
            drafter = csd.DraftModel(model, layers=1, k=k, depth=3, graph=graph)
            out = csd.generate(
                e, [5, 17, 3, 60, 17, 3, 9], drafter=drafter, budget=budget, **options
            )
            assert out.tokens == plain.tokens
            assert out.stats.nodes_proposed > 0
            assert out.stats.nodes_accepted < out.stats.nodes_proposed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_draft_model_of_another_dtype(dtype):
    """Its backend is that of its own dtype, and tokens are those without drafts."""
    target = build("llama")
    options = dict(num_samples=3, max_new_tokens=8, temperature=0.8, seed=2)
    want = csd.generate(target, [3, 4, 5], speculate=False, **options)
    drafter = csd.DraftModel(build("llama", dtype=dtype), k=2, depth=2)
    got = csd.generate(target, [3, 4, 5], drafter=drafter, budget=6, **options)
    assert got.tokens == want.tokens and got.stats.accepted["model"] > 0


def test_one_drafter_serves_calls_of_any_size():
    e = engine(PrefixSum(), Letters(), max_slots=3)
    drafter = draft(PrefixSum(), k=1, depth=3)
    for prompts, new in ((["ab"], 20), (["ab" * 300, "c", "de" * 40], 90), (["xyz"] * 7, 9)):
        options = dict(num_samples=2, max_new_tokens=new, seed=4, temperature=1.0)
        out = csd.generate(e, prompts, drafter=drafter, budget=30, **options)
        plain = csd.generate(e, prompts, speculate=False, **options)
        assert [r.tokens for r in out] == [r.tokens for r in plain]
        # nothing is rejected, so nothing was read from pages of others
        rejected = [r.stats.sample_steps - 2 * -(-new // 4) for r in out]
        assert rejected == [0] * len(prompts)


def test_both_draft_into_one_pool():
    e = engine(PrefixSum(sharpness=8.0), Letters(), max_slots=4)
    options = dict(num_samples=4, max_new_tokens=60, seed=1, temperature=0.5, budget=24)
    out = csd.generate(e, "abcabcabc", drafter=draft(Near(), k=2, graph=True), **options)
    plain = csd.generate(e, "abcabcabc", speculate=False, **options | {"budget": 0})
    assert out.tokens == plain.tokens
    accepted = out.stats.accepted
    assert accepted["model"] > 0 and accepted["own"] + accepted["sibling"] > 0
    assert sum(accepted.values()) == out.stats.nodes_accepted


@pytest.mark.parametrize("worth", [GRAPH, MODEL])
def test_nodes_follow_measured_reliability(worth):
    """Four tokens of the graph's and four of the model's, all expected with 0.5: by turns before
    anything has been seen, those of the reliable one once it has."""

    def kept(reliability):
        tree = SlotTree()
        for token in range(8):
            node = tree.nodes[tree.add(-1, token)]
            node.model, node.graph = (0.5, 0.0) if token % 2 else (0.0, 0.5)
        return likeliest({0: tree}, 4, reliability, [0])[0].token

    reliability = Reliability()
    assert kept(reliability) == [0, 1, 2, 3]
    for _ in range(40):
        reliability.learn(worth, 0.5, True)
        reliability.learn(1 - worth, 0.5, False)
    assert kept(reliability) == ([1, 3, 5, 7] if worth == MODEL else [0, 2, 4, 6])


@pytest.mark.parametrize(
    ("model", "most"), [pytest.param("foreign", 1.1, marks=slow), ("target", 0.8)]
)
def test_the_pool_of_both_follows_the_better_one(model, most):
    """A model that knows nothing costs the graph few steps, one that knows all saves many."""
    e = engine(PrefixSum(sharpness=8.0), Letters(), max_slots=4)
    small = PrefixSum(sharpness=8.0)
    if model == "foreign":
        small.table = small.table.flip(0)
    options = dict(num_samples=4, max_new_tokens=100, seed=1, temperature=0.5, budget=24)
    steps = {}
    for name, drafter in (("graph", None), ("both", draft(small, k=2, graph=True))):
        out = csd.generate(e, ["abcabcabc", "xyxyxy"], drafter=drafter, **options)
        steps[name] = sum(r.stats.sample_steps for r in out)
    assert steps["both"] <= most * steps["graph"]


def test_a_call_repeats_its_drafts():
    """Nothing of one call's texts is left for the next."""
    e = engine(PrefixSum(sharpness=8.0), Letters(), max_slots=4)
    drafter = draft(Near(), k=2, graph=True)
    options = dict(num_samples=3, max_new_tokens=30, seed=1, drafter=drafter, budget=16)
    first = csd.generate(e, "abcabc", drafts=True, **options)
    csd.generate(e, "xyzw", **options)
    again = csd.generate(e, "abcabc", drafts=True, **options)
    assert [s.drafts for s in first] == [s.drafts for s in again]


def test_earlier_samples_draft_beside_the_model():
    e = engine(PrefixSum(sharpness=8.0), Letters())
    options = dict(num_samples=2, max_new_tokens=30, temperature=0, budget=16)
    first = csd.generate(e, "abc", **options)
    again = csd.generate(e, "abc", history=first, drafter=draft(Near(), graph=True), **options)
    assert again.tokens == first.tokens and again.stats.accepted["history"] > 0
    with pytest.raises(ValueError, match="history needs drafter='consensus', got drafter="):
        csd.generate(e, "abc", history=first, drafter=draft(Near()), **options)


def test_automatic_budget_and_triton_free_engines():
    e = engine(PrefixSum(), Letters())
    out = csd.generate(e, "abc", num_samples=2, max_new_tokens=40, seed=1, drafter=draft(Near()))
    plain = csd.generate(e, "abc", num_samples=2, max_new_tokens=40, seed=1, speculate=False)
    assert out.tokens == plain.tokens


@slow
def test_kernels_draft_like_the_references():
    """Steps that are not captured, whatever `static` says."""
    model, drafts = build("llama"), {}
    options = dict(num_samples=2, max_new_tokens=5, seed=2, temperature=0.7, budget=8, drafts=True)
    for kernels in ("reference", "triton"):
        e = csd.Engine(model, kernels=kernels, static=kernels == "triton")
        drafter = csd.DraftModel(model, layers=1, k=2, depth=2)
        out = csd.generate(e, [5, 17, 3, 60], drafter=drafter, **options)
        drafts[kernels] = [[(d.at, d.tokens, d.parents, d.path) for d in s.drafts] for s in out]
        assert out.stats.nodes_proposed > 0
    assert drafts["reference"] == drafts["triton"]


def test_its_memory_is_counted():
    e = engine(PrefixSum(), Letters(), memory=1e-9)
    with pytest.raises(MemoryError, match=r"B for a draft model's\)"):
        csd.generate(e, "abc", max_new_tokens=4, drafter=draft(PrefixSum()))


def test_another_vocabulary_names_both():
    e = engine(PrefixSum(), Letters())
    small = csd.DraftModel(build("llama", dtype=torch.float64))
    message = rf"DraftModel\(LlamaForCausalLM, k=4, depth=5\) has {TINY} tokens, the model has 32"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            csd.generate(e, "abc", drafter=small, max_new_tokens=4)
    # the engine goes on
    assert csd.generate(e, "abc", max_new_tokens=4, seed=1).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=9), "k must be at most 8, got 9"),
        (dict(k=0), "k must be"),
        (dict(depth=17), "depth must be at most 16, got 17"),
        (dict(temperature=0.0), r"temperature must lie in \(0, .*got 0\.0"),
        (dict(k=2, temperature=(1.0,)), r"one entry for each of k=2, got \(1.0,\)"),
        (dict(layers=0), "layers must be"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        csd.DraftModel("nowhere", **options)


def test_what_cannot_be_served():
    e = engine(PrefixSum(), Letters())
    options = dict(max_new_tokens=4, temperature=1.0)
    model = build("llama", dtype=torch.float64)
    with pytest.raises(ValueError, match="layers must be from 1 to 2, got 3"):
        csd.generate(e, "abc", drafter=csd.DraftModel(model, layers=3), **options)
    with pytest.raises(TypeError, match="layers needs a csd Decoder, got PrefixSum"):
        csd.generate(e, "abc", drafter=draft(PrefixSum(), layers=1), **options)
    two = draft(PrefixSum(), k=2, temperature=(1.0, 1.2))
    with pytest.raises(ValueError, match="temperature must be one number with verifier='match'"):
        csd.generate(e, "abc", drafter=two, budget=8, **options)
    with pytest.raises(ValueError, match="'kseq' needs drafts of one distribution"):
        csd.generate(e, "abc", drafter=two, verifier="kseq", budget=8, **options)
    with pytest.raises(ValueError, match="'kseq' draws from one proposal: graph must be False"):
        both = draft(PrefixSum(), graph=True)
        csd.generate(e, "abc", drafter=both, verifier="kseq", budget=8, **options)
