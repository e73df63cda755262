"""EAGLE heads from files: drafts equal those of a plain forward written from the papers."""

import json

import pytest
import torch
from helpers.models.checkpoints import VOCAB, build
from helpers.models.eagle_heads import PlainHead, write
from helpers.targets import few

import csd

LAYERS, PROMPT = 6, [5, 17, 3, 60, 17, 3, 9]
DRAFTED = {1: None, 3: 40}


@pytest.fixture(scope="module")
def target():
    return build("llama", dtype=torch.float64, num_hidden_layers=LAYERS)


def head_of(version, target, folder, **options):
    hidden = target.config.hidden_size
    return write(folder, version, hidden, VOCAB, draft_vocab=DRAFTED[version], **options)


@torch.no_grad()
def states_of(target, ids, version):
    """Hidden states of every token, which the papers call features."""
    out = target.model(torch.tensor([ids]), output_hidden_states=True)
    if version == 1:
        return out.last_hidden_state[0]
    layers = (2, LAYERS // 2, LAYERS - 3)
    return torch.cat([out.hidden_states[i][0] for i in layers], -1)


def plain_head(target, weights, ids, version):
    """A head that has read the committed text, and the state that it guesses last."""
    head = PlainHead(weights, target.model.embed_tokens.weight.data, target.lm_head.weight.data)
    states = states_of(target, ids, version)
    for i, token in enumerate(ids[1:]):
        guess = head.read(token, states[i])
    return head, guess


def chain(head, guess, length):
    out = []
    for _ in range(length):
        out.append(int(head.chances(guess).argmax()))
        guess = head.read(out[-1], guess)
    return out


@few(2)
@pytest.mark.parametrize("embedding", [False, True], ids=["the target's", "its own"])
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("chunk", [2, 512])
def test_chains_are_the_papers(version, embedding, chunk, target, tmp_path):
    """At every step, whatever was accepted and refused before it."""
    weights = head_of(version, target, tmp_path, embedding=embedding)
    e = csd.Engine(target, prefill_chunk=chunk)
    out = e.generate(
        [PROMPT, PROMPT[:2]],
        num_samples=2,
        max_new_tokens=12,
        seed=3,
        temperature=0.8,
        budget=16,
        drafter=csd.Eagle(tmp_path, k=1, depth=3, temperature=1e-3),
        drafts=True,
        ignore_eos=True,
    )
    plain = e.generate(
        [PROMPT, PROMPT[:2]],
        num_samples=2,
        max_new_tokens=12,
        seed=3,
        temperature=0.8,
        speculate=False,
        ignore_eos=True,
    )
    assert [r.tokens for r in out] == [r.tokens for r in plain]
    seen = 0
    for result in out:
        for sample in result:
            for drafted in sample.drafts:
                if len(drafted.tokens) > 1:
                    text = result.prompt_ids + sample.tokens[: drafted.at]
                    head, guess = plain_head(target, weights, text, version)
                    assert drafted.tokens[1:] == chain(head, guess, len(drafted.tokens) - 1)
                    seen += 1
    assert seen > 20


def dynamic_tree(head, guess, k, depth, nodes):
    """EAGLE-2's: each level expands the k paths of largest confidence, of all drafted tokens the
    `nodes` most confident remain. Paths as tuples."""
    level, found = [((), 1.0, head, guess)], {}
    for _ in range(depth):
        below = []
        for path, above, at, state in level:
            p = at.chances(state)
            for token in p.topk(k).indices.tolist():
                found[(*path, token)] = above * float(p[token])
                below.append((above * float(p[token]), (*path, token), at, state))
        level = []
        for chance, path, at, state in sorted(below, key=lambda x: -x[0])[:k]:
            after = at.copy()
            level.append((path, chance, after, after.read(path[-1], state)))
    return set(sorted(found, key=lambda p: -found[p])[:nodes])


@pytest.mark.parametrize("version", [1, 3])
def test_the_tree_is_eagle_2s(version, target, tmp_path):
    weights = head_of(version, target, tmp_path)
    e = csd.Engine(target)
    # tokens that end a sample are not drafted
    out = e.generate(
        PROMPT,
        max_new_tokens=5,
        temperature=0,
        budget=11,
        drafts=True,
        ignore_eos=True,
        drafter=csd.Eagle(tmp_path, k=4, depth=3),
    )
    # confidences are as the head gives them until something has been learned
    first = out[0].drafts[0]
    paths = [()]
    for token, parent in zip(first.tokens[1:], first.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    head, guess = plain_head(target, weights, PROMPT, version)
    assert set(paths[1:]) == dynamic_tree(head, guess, 4, 3, 11)


@few(1)
@pytest.mark.parametrize("version", [1, 3])
def test_with_the_graph_after_pauses_and_from_a_prompt_of_one_token(version, target, tmp_path):
    head_of(version, target, tmp_path)
    e = csd.Engine(target, max_slots=3)
    options = dict(num_samples=4, max_new_tokens=12, seed=5, temperature=0.9)
    plain = e.generate([[5], PROMPT], speculate=False, **options)
    for budget in (1, "auto", 40):
        drafter = csd.Eagle(tmp_path, k=3, depth=3, graph=True)
        out = e.generate([[5], PROMPT], budget=budget, drafter=drafter, **options)
        assert [r.tokens for r in out] == [r.tokens for r in plain]
    for budget in ("auto", 40):
        drafter = csd.Eagle(tmp_path, k=3, depth=3)
        e.generate([[5], PROMPT], budget=budget, drafter=drafter, verifier="recursive", **options)


def test_a_prompt_of_one_token_has_no_state_before_it(target, tmp_path):
    """Not that of another prompt either, which would draft for this one."""
    head_of(1, target, tmp_path)
    options = dict(max_new_tokens=6, temperature=0, budget=4, drafts=True, ignore_eos=True)
    drafter = csd.Eagle(tmp_path, k=1, depth=3)
    alone = csd.Engine(target).generate([5], drafter=drafter, **options)
    e = csd.Engine(target)
    e.generate(PROMPT, drafter=drafter, **options)
    assert e.generate([5], drafter=drafter, **options)[0].drafts == alone[0].drafts


def refused(target, folder, message, error=ValueError):
    with pytest.raises(error, match=message):
        csd.Engine(target).generate(PROMPT, max_new_tokens=4, drafter=csd.Eagle(folder))


def test_other_models_heads_are_refused(target, tmp_path):
    refused(target, tmp_path, r"is not an EAGLE head: it needs config\.json and \*\.safetensors")
    hidden = target.config.hidden_size
    write(tmp_path, 1, hidden, VOCAB + 1)
    refused(target, tmp_path, f"Eagle.* has {VOCAB + 1} tokens, the model has {VOCAB}")
    write(tmp_path, 1, hidden + 8, VOCAB)
    refused(target, tmp_path, f"for another hidden size than the model's {hidden}")
    write(tmp_path, 3, hidden, VOCAB, draft_vocab=40, states=2 * hidden)
    refused(target, tmp_path, f"for another hidden size than the model's {hidden}")
    write(tmp_path, 3, hidden, VOCAB, draft_vocab=40)
    small = build("llama", dtype=torch.float64)
    refused(small, tmp_path, "needs a model of at least 4 layers, got 2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 8}))
    refused(target, tmp_path, r"must have 'midlayer.mlp.gate_proj.weight' of shape \(8, 40\)")
    target.save_pretrained(tmp_path)
    refused(target, tmp_path, "has no weights 'fc.weight': it is not an EAGLE head")
