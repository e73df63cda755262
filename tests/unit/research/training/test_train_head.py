"""A head that is trained: its formula, its losses, its bits after an interruption, its drafts."""

import json
import random

import pytest
import torch
import torch.nn.functional as F
from helpers.models import families
from helpers.models.checkpoints import VOCAB, build
from helpers.models.eagle_heads import (
    EPS,
    HEADS,
    INTER,
    KV_HEADS,
    THETA,
    D,
    PlainHead,
    assert_rounds_as,
)
from helpers.runs.trace_file import trace_file
from helpers.targets import slow, values
from training_runs import files, recorded, tau_of

import csd
from csd.models.fused.config import ModelConfig
from csd.models.fused.fuse import fuse
from csd.research.training import eagle2 as losses_module
from csd.research.training.eagle2 import ByStates, TrainedHead
from csd.research.training.eagle3 import ByChains
from csd.research.training.target import Target
from csd.research.training.texts import Text, batches, read_texts, split


@pytest.fixture(scope="module")
def target():
    return build("llama", dtype=torch.float64, num_hidden_layers=4)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head_of(hidden, dtype=torch.float64):
    config = ModelConfig(
        family="llama",
        vocab=VOCAB,
        hidden=hidden,
        intermediate=INTER,
        layers=1,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=D,
        context=64,
        norm_eps=EPS,
        rope_theta=THETA,
    )
    head = TrainedHead(config, dtype, torch.device("cpu"), 0)
    with torch.no_grad():
        for i, weight in enumerate(head.parameters()):
            weight.add_(normal(*weight.shape, seed=i) * 0.3)
    return head


def test_the_head_has_the_papers_formula():
    hidden, lengths = 12, [5, 1, 3]
    head, embedding = head_of(hidden), normal(VOCAB, hidden)
    tokens, states = torch.randint(VOCAB, (9,)), normal(9, hidden, seed=1)
    guess = head(embedding[tokens], states, lengths)
    weights = {k: x.detach() for k, x in head.named_parameters()} | {"fc.bias": torch.zeros(hidden)}
    plain = {torch.float32: [], torch.float64: []}
    for n, part, before in zip(lengths, tokens.split(lengths), states.split(lengths), strict=True):
        for rounded, guesses in plain.items():
            alone = PlainHead(weights, embedding, embedding, rounded)
            guesses += [alone.read(part[i], before[i]) for i in range(n)]
    assert_rounds_as(guess, *(torch.stack(guesses) for guesses in plain.values()))


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3"])
def test_states_are_the_models(family):
    """Hidden states of texts of different lengths, taken in one pass."""
    model = build(family, dtype=torch.float64)
    rng = random.Random(0)
    texts = [Text([rng.randrange(VOCAB) for _ in range(n)], 1) for n in (7, 1, 20, 3)]
    target = Target(fuse(model))
    states = target.states(texts)
    with torch.no_grad():
        for text, found in zip(texts, states.split([7, 1, 20, 3]), strict=True):
            out = model.model(torch.tensor([text.tokens])).last_hidden_state[0]
            torch.testing.assert_close(found, out, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(target.logits(found), model.lm_head(out))


def test_losses_and_their_gradient_are_the_formulas(target, monkeypatch):
    monkeypatch.setattr(losses_module, "ROWS", 4)
    model, rows, weight = Target(fuse(target)), 10, 0.3
    states, token = normal(rows, 40, seed=2), torch.arange(rows) * 7 % VOCAB
    x = normal(rows, 40, seed=3).requires_grad_()
    guess = x * 2
    found = losses_module.losses(model, guess, states, token, weight)
    y = x.detach().requires_grad_()
    head = target.lm_head.weight.data
    p = (states @ head.T).softmax(-1)
    by_state = F.smooth_l1_loss(y * 2, states)
    by_token = -(p * (y * 2 @ head.T).log_softmax(-1)).sum(-1).mean()
    (by_state + weight * by_token).backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert found.mean([weight]) == pytest.approx(float((by_state + weight * by_token).detach()))
    with torch.no_grad():
        alone = losses_module.losses(model, guess, states, token)
    assert alone.mean([weight]) == found.mean([weight])
    assert alone.acceptance[0] == float(((guess @ head.T).argmax(-1) == token).double().mean())


def test_places_are_those_whose_next_token_is_the_samples():
    assert [*Text([1, 2, 3, 4, 5, 6], 3).learnt] == [2, 3, 4]
    # the first place has no state before it
    assert [*Text([1, 2, 3, 4], 1).learnt] == [1, 2]
    assert not Text([1, 2], 1).learnt and not Text([1, 2, 3], 3).learnt


def test_prompts_are_held_out_whole():
    prompts = [[Text([i, 5, j, 7], 2) for j in range(i % 3 + 1)] for i in range(20)]
    learnt, kept = split(prompts, 0.2, seed=4)
    assert len({t.tokens[0] for t in kept}) == 4
    assert not {t.tokens[0] for t in kept} & {t.tokens[0] for t in learnt}
    assert sorted(t.tokens for t in learnt + kept) == sorted(t.tokens for p in prompts for t in p)
    assert split(prompts, 0.2, seed=4) == (learnt, kept) != split(prompts, 0.2, seed=5)
    assert len(split(prompts, 0.001, seed=0)[1]) > 0 == len(split(prompts, 0, seed=0)[1])


def test_a_batch_has_room_for_its_texts():
    texts = [Text([0] * n, 1) for n in (5, 9, 3, 30, 4, 4, 8)]
    found = batches(texts, 12, random.Random(0))
    assert sorted(len(t.tokens) for b in found for t in b) == sorted(len(t.tokens) for t in texts)
    assert all(len(b) == 1 or sum(len(t.tokens) for t in b) <= 12 for b in found)
    assert found == batches(texts, 12, random.Random(0)) != batches(texts, 12)


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    return recorded(target, tmp_path_factory.mktemp("traces") / "traces.jsonl")


@slow
def test_a_head_that_has_learnt_the_samples_drafts_them(target, traces, tmp_path):
    """Chains of three tokens are drafted whole, where those of the first weights are not."""
    tau = {}
    for name, epochs in (("first", 1), ("last", 150)):
        curve = csd.train_head(
            target,
            traces,
            tmp_path / name,
            epochs=epochs,
            batch=64,
            learning_rate=1e-2,
            token_weight=1.0,
            noise=0,
            held_out=0,
        )
        assert curve[-1]["acceptance"] is None
        tau[name] = tau_of(target, tmp_path / name)
    assert tau["first"] < 1.5 and tau["last"] > 3.4, tau


@values
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eagle", [2, 3])
def test_an_interrupted_run_ends_with_the_same_bits(
    eagle, dtype, target, traces, tmp_path, monkeypatch
):
    options = dict(epochs=4, batch=64, every=2, held_out=0.3, dtype=dtype, eagle=eagle)
    options |= dict(depth=3, draft_vocab=50) if eagle == 3 else {}
    curve = csd.train_head(target, traces, tmp_path / "whole", **options)
    assert len(curve) > 3
    whole = files(tmp_path / "whole")
    assert {*whole} == {"config.json", "model.safetensors", "curve.jsonl"}
    assert [json.loads(line) for line in whole["curve.jsonl"].splitlines()] == curve
    assert 0 <= curve[-1]["acceptance"] < 1 and curve[-1]["loss"] < curve[0]["loss"]

    # between two steps, and within one whose row is not due
    def stop(row):
        if row["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        csd.train_head(target, traces, tmp_path / "part", callback=stop, **options)
    assert {*files(tmp_path / "part")} == {"training.pt"}
    method = ByChains if eagle == 3 else ByStates
    real, calls = method.losses, []

    def fail(*args):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(method, "losses", fail)
    with pytest.raises(KeyboardInterrupt):
        csd.train_head(target, traces, tmp_path / "part", **options)
    steps = []
    again = csd.train_head(
        target, traces, tmp_path / "part", callback=lambda row: steps.append(row["step"]), **options
    )
    assert steps[0] == 6 and again == curve
    assert files(tmp_path / "part") == whole


def test_other_settings_do_not_continue_a_run(target, traces, tmp_path):
    def stop(row):
        raise KeyboardInterrupt

    options = dict(epochs=2, batch=64, every=1, held_out=0.3, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        csd.train_head(target, traces, callback=stop, **options)
    changed = r"was written with other settings \(seed 0, now 1\); choose another folder"
    with pytest.raises(ValueError, match=changed):
        csd.train_head(target, traces, seed=1, **options)
    with pytest.raises(ValueError, match=r"eagle 2, now 3, token_weight 0\.1, now None"):
        csd.train_head(target, traces, eagle=3, **options)
    with pytest.raises(ValueError, match=r"settings \(texts '.*', now '.*'\)"):
        csd.train_head(target, recorded(target, tmp_path / "t.jsonl", seed=4), **options)
    (tmp_path / "training.pt").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"training\.pt is not the state of a training run"):
        csd.train_head(target, traces, **options)
    (tmp_path / "training.pt").unlink()
    csd.train_head(target, traces, **options)
    with pytest.raises(ValueError, match="out must be a folder without a head"):
        csd.train_head(target, traces, **options)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(epochs=0), "epochs must be at least 1"),
        (dict(batch=1.5), "batch must be a whole number"),
        (dict(batch=2), "traces must have samples that begin within the first batch=2 tokens"),
        (dict(learning_rate=0), r"learning_rate must lie in \(0, inf\)"),
        (dict(held_out=0.6), r"held_out must lie in \[0, 0.5\]"),
        (dict(noise=-1), "noise must lie in"),
        (dict(token_weight="a"), "token_weight must be a number"),
        (dict(seed=None), "seed must be a whole number"),
        (dict(eagle=1), r"eagle must be 2 \(EAGLE-1 and EAGLE-2\) or 3, got 1"),
        (dict(eagle="3"), "eagle must be a whole number, got '3'"),
        (dict(eagle=3, noise=0), "noise is an argument of eagle=2, got noise=0 with eagle=3"),
        (dict(eagle=3, token_weight=1.0), "token_weight is an argument of eagle=2"),
        (dict(depth=3), "depth is an argument of eagle=3, got depth=3 with eagle=2"),
        (dict(draft_vocab=9), "draft_vocab is an argument of eagle=3"),
        (dict(eagle=3, depth=0), "depth must be at least 1"),
        (dict(eagle=3, decay=1.5), r"decay must lie in \(0, 1\]"),
        (dict(eagle=3, draft_vocab=0), "draft_vocab must be at least 1"),
        (dict(eagle=3, draft_vocab=98), "draft_vocab must be at most the model's vocabulary of 97"),
        (dict(dtype=torch.float16), "dtype must be one of torch.bfloat16"),
        (dict(out=3), "out must be a path"),
        (dict(traces=3), "traces must be a path or a list of paths"),
        (dict(traces=[3]), "traces must be a path"),
        (dict(model=[3]), "model must be a transformers model, a local folder"),
        (dict(device="cpu"), "device must be None for a model that is already loaded"),
    ],
)
def test_errors_name_the_argument(changes, message, target, traces, tmp_path):
    given = dict(model=target, traces=traces, out=tmp_path / "out") | changes
    with pytest.raises((ValueError, TypeError), match=message):
        csd.train_head(**given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "family, message",
    [
        ("gemma2", r"no cap on scores, got 2\.0"),
        ("qwen3_5_text", "no layers with a state"),
        (
            "mistral",
            "batch must be at most 5, the window of the model's attention, .* of 25 tokens",
        ),
    ],
)
def test_attention_that_is_not_computed_is_refused(family, message, traces, tmp_path):
    windows = dict(sliding_window=5) if family == "mistral" else {}
    model = families.build(family, vocab_size=VOCAB, **windows)
    with pytest.raises(ValueError, match=message):
        csd.train_head(model, traces, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if windows:
        csd.train_head(model, traces, tmp_path / "out", epochs=1, batch=5)


def test_traces_that_cannot_be_learnt_are_named(target, tmp_path):
    path = trace_file(tmp_path / "t.jsonl", {"samples": [[3, VOCAB]]})
    with pytest.raises(ValueError, match=rf"vocabulary of {VOCAB}, got {VOCAB} in .*t\.jsonl"):
        read_texts([path], VOCAB, 99)
    path = trace_file(tmp_path / "t.jsonl", {"samples": [[3, 4]]})
    with pytest.raises(ValueError, match=r"more prompts than are held out, got 1 .*held_out=0\.05"):
        csd.train_head(target, path, tmp_path / "out")
    path = trace_file(tmp_path / "t.jsonl", {"samples": [[3, 4]]}, {"samples": [[3, 5]]})
    # one prompt, in two lines
    assert [len(texts) for texts in read_texts([path], VOCAB, 99)] == [2]
