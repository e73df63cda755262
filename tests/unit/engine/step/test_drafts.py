"""Records of steps match the steps."""

import pytest
from helpers.models.scripted import Letters, PrefixSum, engine

import csd
from csd.engine.results.result import pieces, to_json


@pytest.mark.parametrize("lag", [0, 2])
def test_drafts_have_every_steps_tree_and_path(lag):
    model = PrefixSum(sharpness=4.0)
    prompt = [1, 2, 1, 2, 3]
    options = dict(num_samples=4, max_new_tokens=30, seed=0, stop_token_ids=[0], budget=12)
    out = csd.generate(engine(model, max_slots=3, lag=lag), prompt, drafts=True, **options)
    rejected = 0
    for s in out:
        assert len(s.steps) == len(s.tokens) == len(s.sources)
        assert [d.at for d in s.drafts] == sorted({s.steps.index(k) for k in s.steps})
        for d in s.drafts:
            committed = [i for i, step in enumerate(s.steps) if step == d.step]
            assert committed == list(range(d.at, d.at + len(d.path) + 1))
            assert d.tokens[0] == (prompt + s.tokens)[len(prompt) + d.at - 1]
            assert (d.parents[0], d.probabilities[0], d.sources[0]) == (-1, 1, "")
            # the path descends from the root, and its tokens are the sample's
            assert [d.parents[j] for j in d.path] == [0, *d.path][: len(d.path)]
            assert [d.tokens[j] for j in d.path] == s.tokens[d.at : d.at + len(d.path)]
            assert [d.sources[j] for j in d.path] + [""] == [s.sources[i] for i in committed]
            for j in range(1, len(d.tokens)):
                assert 0 <= d.parents[j] < j
                assert 0 < d.probabilities[j] <= d.probabilities[d.parents[j]]
            # where the path ends no child is the token that was sampled
            if s.finish_reason != "stop" or committed[-1] + 1 < len(s.tokens):
                last = d.path[-1] if d.path else 0
                children = [t for t, p in zip(d.tokens, d.parents, strict=True) if p == last]
                rejected += bool(children)
                if committed[-1] + 1 < len(s.tokens):
                    assert s.tokens[committed[-1]] not in children
    assert rejected
    nodes = sum(len(d.tokens) - 1 for s in out for d in s.drafts)
    assert nodes == out.stats.nodes_proposed > 0
    accepted = sum(len(d.path) for s in out for d in s.drafts)
    assert accepted == out.stats.nodes_accepted > 0
    plain = csd.generate(engine(model, max_slots=3), prompt, **options)
    assert plain.tokens == out.tokens
    assert plain[0].drafts == []


def test_json_has_the_text_of_every_token():
    e = engine(PrefixSum(sharpness=4.0), Letters())
    out = csd.generate(e, "abab", num_samples=2, max_new_tokens=20, seed=0, budget=8, drafts=True)
    result = to_json(out, e.tokenizer, "letters", drafts=True)
    for tokens, text in zip(result["tokens"], result["texts"], strict=True):
        assert "".join(result["pieces"][t] for t in tokens) == text
    drafted = [t for s in result["drafts"] for d in s for t in d["tokens"]]
    assert len(drafted) > len(out.tokens[0])
    assert {*drafted} <= set(result["pieces"])
    assert "drafts" not in to_json(out, e.tokenizer, "letters", drafts=False)


class Spaces:
    """Like SentencePiece: a text's leading space is dropped."""

    def decode(self, tokens):
        return "".join([" a", " b", "c"][t] for t in tokens).removeprefix(" ")


def test_pieces_keep_their_leading_space():
    assert pieces(Spaces(), [0, 1, 2]) == {0: " a", 1: " b", 2: "c"}
