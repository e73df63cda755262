"""Rows of `python -m bench replay --prior` and of `python -m bench vote_steps`."""

import json

import pytest
from helpers.runs.trace_file import trace_file

import csd
from bench.studies.drafting import replay, vote_steps
from csd.models.demo import toy

pytestmark = pytest.mark.bench


def phrases(count, samples=2, shift=0, top=False):
    """Lines of a trace whose answers have a phrase in common, each behind a first token."""
    phrase = [(7 * j + j * j) % 50 + 10 + shift for j in range(24)]
    lines = []
    for p in range(count):
        texts = [[p + 100 + 20 * s, *phrase] for s in range(samples)]
        line = {"problem": p, "prompt_ids": [3, p + 4], "samples": texts}
        if top:
            line["top"] = [[[[t], [0.9]] for t in text] for text in texts]
        lines.append(line)
    return lines


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("kind", ["halves", "call"])
def test_a_prior_of_other_problems_is_compared_with_the_graph_alone(tmp_path, kind, top):
    path = trace_file(tmp_path / "a.jsonl", *phrases(6, top=top))
    out = tmp_path / "f.json"
    replay.main([str(path), "--prior", kind, "--samples", "1", "2", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    names = [f"consensus, {kind}", f"prior of {kind}"] * 2
    assert [r["drafter"] for r in rows] == names and {r["prior"] for r in rows} == {kind}
    for alone, row in zip(rows[::2], rows[1::2], strict=True):
        assert row["problems"] == (3 if kind == "halves" else 6)
        # the first problem of a call has nothing to draft from
        assert row["ratio"] == pytest.approx(row["tau"] / alone["tau"]) and row["ratio"] > 1.3
        low, high = row["ratio_interval"]
        assert low <= row["ratio"] <= high and row["draft_ratio"] > 0


def test_a_prior_of_another_file_has_a_row_of_its_own(tmp_path):
    path = trace_file(tmp_path / "a.jsonl", *phrases(4))
    other = trace_file(tmp_path / "b.jsonl", *phrases(4, shift=300))
    out, own = tmp_path / "f.json", tmp_path / "own.csdprior"
    prior = csd.Prior()
    prior.add([3, 9], [line["samples"][0] for line in phrases(4)])
    prior.save(own)
    for learn in ([], ["--learn", str(other)], ["--learn", str(own)]):
        replay.main([str(path), "--prior", "halves", "--samples", "1", *learn, "--json", str(out)])
    found = json.loads(out.read_text())
    rows = {r["drafter"]: r for r in found["rows"]}
    priors = {"prior of halves", "prior of b", "prior of own"}
    assert rows.keys() == {"consensus, halves", *priors}
    assert rows["prior of own"]["ratio"] > 1.3
    assert rows["prior of halves"]["ratio"] > 1.3 > rows["prior of b"]["ratio"]
    assert rows["prior of b"]["learnt"] == ["b"] and len(found["runs"]) == 3


def test_steps_to_a_certain_vote(tmp_path):
    _, tokenizer = toy()
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def text(answer, words):
        ids = tokenizer(f"{words} The answer is {answer}.", add_special_tokens=False)["input_ids"]
        return [*ids, tokenizer.eos_token_id]

    answers = [["7", "7", "3", "7"], ["2", "5", "6", "2"]]
    words = ["a b c d e ", "a b c d e f g h ", "a b ", "a b c "]
    samples = [[text(*x) for x in zip(of, words, strict=True)] for of in answers]
    lines = [{"problem": i, "prompt_ids": [5, 6], "samples": s} for i, s in enumerate(samples)]
    path, out = trace_file(tmp_path / "a.jsonl", *lines), tmp_path / "f.json"
    vote_steps.main(
        [
            *(str(path), "--tokenizer", str(tmp_path / "tokenizer")),
            *("--samples", "4", "--rows", "32", "--json", str(out)),
        ]
    )
    found = json.loads(out.read_text())
    length = [[len(s) for s in of] for of in samples]
    # two votes of four for the answer that comes first cannot be overtaken by two others
    assert found["deciding"] == [2, 4] and found["ends"]["plain"] == length
    rows = {r["engine"]: r for r in found["rows"]}
    assert rows["plain"]["steps to the last sample"] == sum(map(max, length))
    assert rows["plain"]["steps to a certain vote"] == max(length[0][:2]) + max(length[1])
    majority = max(length[0][i] for i in (0, 1, 3))
    assert rows["plain"]["to a majority in any order"] == majority + max(length[1])
    for name in ("steps to the last sample", "steps to a certain vote"):
        assert rows["plain"][name] > rows["csd"][name] > rows["csd, a prior"][name]
