"""EAGLE-3's chains while a head learns: their formula, the engine's logits, and their loss."""

import itertools
import math

import pytest
import torch
from helpers.checks.precision import within_eager
from helpers.models.checkpoints import VOCAB, build
from helpers.models.eagle_heads import EPS, PlainHead, assert_rounds_as
from helpers.models.eagle_heads import D as HEAD_DIM

import csd
from csd.models.fused.fuse import fuse
from csd.research.draft_models.eagle import EagleHead, read_layers
from csd.research.training import eagle3 as attention_module
from csd.research.training import eagle3 as losses_module
from csd.research.training.eagle3 import Eagle3Head
from csd.research.training.target import Target
from csd.research.training.texts import Pairs, Text, maps

LAYERS, DEPTH, PROMPT = 4, 3, [5, 17, 3, 60, 17, 3, 9]
CPU = torch.device("cpu")
TOKENS = torch.arange(3, 83, 2)


def target_of(dtype):
    model = build(
        "llama", dtype=dtype, num_hidden_layers=LAYERS, head_dim=HEAD_DIM, rms_norm_eps=EPS
    )
    target = Target(fuse(model))
    target.decoder.taps = read_layers(LAYERS)
    return model, target


def head_of(target, token, dtype):
    """A head whose weights are far from its first ones, the same in every dtype."""
    head = Eagle3Head(target, token, dtype, seed=0)
    with torch.no_grad():
        for i, weight in enumerate(head.parameters()):
            drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
            weight.copy_((weight + drawn * 0.2).float())
    return head


def unrolled(head, target, texts, depth=DEPTH):
    """States of chains, and the pairs that they begin at."""
    pairs = Pairs(texts, CPU)
    states, joined = target.states_and_taps(texts)
    embedded = target.embedding[pairs.token[pairs.at]]
    return head(embedded, joined[pairs.at - 1], pairs, depth), states[pairs.learnt_at], pairs


TEXTS = [
    Text([5, 17, 3, 60, 17, 9, 11, 33], 3),
    Text([8, 2, 7], 1),
    Text([4, 90, 51, 6, 6, 19], 1),
    Text([1, 2, 3, 4, 5, 6, 7], 5),
]


@pytest.mark.parametrize("rows", [2, 256])
@torch.no_grad()
def test_chains_have_the_papers_formula(rows, monkeypatch):
    """Each chain alone: a plain head reads the text's pairs, then the chain's own guesses."""
    monkeypatch.setattr(attention_module, "CHAIN_ROWS", rows)
    model, target = target_of(torch.float64)
    head = head_of(target, TOKENS, torch.float64)
    guesses, _, pairs = unrolled(head, target, TEXTS)
    weights = dict(head.named_parameters()) | maps(TOKENS, VOCAB)
    plain = {torch.float32: [[] for _ in range(DEPTH)], torch.float64: [[] for _ in range(DEPTH)]}
    for text, (rounded, steps) in itertools.product(TEXTS, plain.items()):
        out = model.model(torch.tensor([text.tokens]), output_hidden_states=True)
        joined = torch.cat([out.hidden_states[i][0] for i in read_layers(LAYERS)], -1)
        read = PlainHead(weights, target.embedding, None, rounded)
        for i in range(1, len(text.tokens) - 1):
            guess = read.read(text.tokens[i], joined[i - 1])
            chain = read.copy()
            for step in range(min(DEPTH, len(text.tokens) - 1 - i)):
                if step:
                    guess = chain.read(text.tokens[i + step], guess)
                if i in text.learnt:
                    steps[step].append(guess)
    lengths = [len(x) for x in plain[torch.float32]]
    assert lengths == [5 + 1 + 4 + 2, 4 + 3 + 1, 3 + 2]
    assert lengths == [len(pairs.chains(step)[0]) for step in range(DEPTH)]
    for got, *expected in zip(guesses, *plain.values(), strict=True):
        assert_rounds_as(got, *map(torch.stack, expected))


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """Texts with chains that an engine drafted from a head's files, and its logits of each."""
    folder = tmp_path_factory.mktemp("head")
    model, target = target_of(torch.float32)
    config, weights = head_of(target, TOKENS, torch.float32).published()
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)
    seen, real = [], EagleHead.logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleHead, "logits", lambda s, x: seen.append(real(s, x)) or seen[-1])
        out = csd.Engine(model, kernels="reference").generate(
            PROMPT,
            max_new_tokens=12,
            seed=3,
            temperature=0.8,
            budget=8,
            drafts=True,
            drafter=csd.Eagle(folder, k=1, depth=DEPTH, temperature=1e-3),
            ignore_eos=True,
        )
    texts, logits, done = [], [], 0
    for found in out[0].drafts:
        chain = found.tokens[1:]
        part, done = seen[done : done + len(chain)], done + len(chain)
        # a chain's tokens are the likeliest ones
        assert [int(z.argmax()) for z in part] == chain
        if len(chain) == DEPTH:
            text = PROMPT + out[0].tokens[: found.at]
            texts.append(Text(text + chain, len(text)))
            logits.append(torch.cat(part)[:, TOKENS])
    assert len(texts) > 4
    return texts, torch.stack(logits, 1)


def logits_of(texts, dtype):
    """[DEPTH, texts, Vd] of the chains that begin at the texts' first learnt pairs."""
    _, target = target_of(dtype)
    head = head_of(target, TOKENS, dtype)
    with torch.no_grad():
        guesses, _, pairs = unrolled(head, target, texts)
        first = [sum(len(t.learnt) for t in texts[:i]) for i in range(len(texts))]
        out = []
        for step, guess in enumerate(guesses):
            at = [pairs.chains(step)[0].index(base) for base in first]
            out.append(head.logits(guess[at]))
    return torch.stack(out)


def wrong_position(self, product, x, position=None, real=Eagle3Head._heads):
    """Chains stand one place behind where they are; their texts do not."""
    learnt = position is not None and int(position[0]) > 0
    return real(self, product, x, position + 1 if learnt else position)


def no_mask(rows, keys, device):
    return torch.zeros(rows, keys, dtype=torch.bool)


def without_own_keys(q, k, v, own_k, own_v, *rest, real=attention_module.chain_attention):
    return real(q, k, v, own_k[:0], own_v[:0], *rest)


def test_chains_have_the_logits_of_the_engines_drafts(drafted, monkeypatch):
    """Within the error of float32; with an error in positions, masks or keys, they do not."""
    texts, engine = drafted
    exact = logits_of(texts, torch.float64)
    # the longest sum joins three layers' states
    length = 3 * 40
    within_eager(engine, logits_of(texts, torch.float32), exact, length)
    for place, name, wrong in (
        (Eagle3Head, "_heads", wrong_position),
        (attention_module, "_later", no_mask),
        ("csd.research.training.eagle3.chain_attention", None, without_own_keys),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, *([wrong] if name is None else [name, wrong]))
            other = logits_of(texts, torch.float64)
        with pytest.raises(AssertionError, match="error"):
            within_eager(other.float(), engine, exact, length)


@pytest.mark.parametrize("token", [None, TOKENS], ids=["all tokens", "its own tokens"])
def test_the_loss_and_its_gradients_are_the_formulas(token, monkeypatch):
    monkeypatch.setattr(losses_module, "ROWS", 4)
    model, target = target_of(torch.float64)
    decay = 0.7
    found, gradients = {}, {}
    for name in ("ours", "plain"):
        head = head_of(target, token, torch.float64)
        guesses, states, pairs = unrolled(head, target, TEXTS, depth=5)
        if name == "ours":
            with torch.no_grad():
                alone = losses_module.chain_losses(target, head, guesses, states, pairs, 5)
            sums = losses_module.chain_losses(target, head, guesses, states, pairs, 5, decay)
            assert sums.tokens == alone.tokens and sums.places == alone.places
            found[name] = sums.mean([decay**j for j in range(5)])
        else:
            z = states @ model.lm_head.weight.data.T
            of = torch.arange(VOCAB) if token is None else token
            p = z[:, of].softmax(-1) * torch.isin(z.argmax(-1), of)[:, None]
            total, hits = 0, []
            for step, guess in enumerate(guesses):
                at = torch.tensor(pairs.chains(step)[0]) + step
                drafted = head.logits(guess)
                total = total - decay**step * (p[at] * drafted.log_softmax(-1)).sum()
                following = pairs.token[pairs.learnt_at[at] + 1]
                hits.append(int((of[drafted.argmax(-1)] == following).sum()))
            assert alone.hits[: len(hits)] == hits and alone.places[0] == len(states)
            assert alone.acceptance[0] == hits[0] / len(states)
            (total / len(states)).backward()
            found[name] = float(total.detach()) / len(states)
        gradients[name] = {k: x.grad for k, x in head.named_parameters()}
    assert math.isclose(found["ours"], found["plain"], rel_tol=1e-12)
    for name, gradient in gradients["plain"].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients["ours"][name], gradient, msg=name)
