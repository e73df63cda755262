"""Votes, when they are decided, and that what was drawn beyond does not matter."""

import dataclasses
import itertools
import math
import re

import pytest
from helpers.examples_main import main_of
from helpers.models.scripted import Letters, PrefixSum, engine
from helpers.targets import slow
from hypothesis import given, settings
from hypothesis import strategies as st

import csd
from csd.engine.results.result import Sample
from csd.evaluate.answers.equality import canonical
from csd.evaluate.answers.extract import EXTRACTORS
from csd.evaluate.vote import vote
from csd.models.demo import toy


def sample(index, text, reason="stop", logprobs=()):
    return Sample(index, text, [], list(logprobs), [], reason)


def test_a_majority_with_ties_to_the_lowest_index():
    out = [sample(0, "5"), sample(1, "3"), sample(2, "3"), sample(3, "5"), sample(4, "?")]
    decided = vote(out)
    assert (decided.answer, decided.count, decided.total) == ("5", 2, 4)
    assert decided.answers == ["5", "3", "3", "5", None]
    assert vote(out, weight=lambda s: 1 + s.index == 3).answer == "3"
    assert vote([sample(0, "none")]).answer is None
    assert vote(out, extract=lambda text: text + "!").answer == "5!"
    assert vote([sample(0, r"\boxed{1} or 2")], extract="number").answer == "2"


def test_spellings_of_one_answer_are_one_vote():
    texts = [r"\boxed{0.5}", r"\boxed{3}", r"\boxed{\frac12}", r"\boxed{3}", r"\boxed{1/2}"]
    out = [sample(i, text) for i, text in enumerate(texts)]
    decided = vote(out, extract="boxed")
    assert (decided.answer, decided.count) == ("0.5", 3)
    assert decided.answers == ["0.5", "3", "0.5", "3", "0.5"]
    # two of two votes leave three, which cannot be known to agree
    assert [csd.Vote("boxed").decided(out[:n], 5) for n in range(1, 6)] == [False] * 4 + [True]
    assert csd.Vote("boxed").of(4)(out[:3]) is True  # a tie would go to the first
    assert csd.Vote().of(3)([out[0], out[2]]) is True
    # one's own function says what is equal
    assert vote(out, extract=lambda text: text[7:-1]).answer == "3"


THOUGHTS = [
    r"<think>Maybe \boxed{5}? No.</think>The answer is 6.",
    r"Maybe \boxed{5}? No.</think>So \boxed{6}.",
    "<think>The answer is 5.</think>¶It is 6.",
    "<think>5</think> 7? <think>9</think> The answer is 6.",
]


def test_thoughts_do_not_vote():
    out = [sample(i, text.replace("¶", "\n")) for i, text in enumerate(THOUGHTS)]
    open_one = sample(len(out), r"<think>Maybe \boxed{5}, or 6")
    for extract in EXTRACTORS.values():
        answers = vote([*out, open_one], extract=extract).answers
        assert "5" not in answers and answers[-1] is None
    assert vote(out).answers == ["6"] * 4
    assert csd.Vote().of(4)(out[:2]) is True
    # a function of one's own gets the whole text
    assert vote(out, extract=lambda text: text).answers == [s.text for s in out]


def test_a_text_that_its_prompt_begins_in_a_thought():
    """Only the part behind the end tag is an answer, for votes and while samples are drawn."""
    out = [sample(0, "The answer is 5."), sample(1, "5?</think>The answer is 6.")]
    assert vote(out).answers == ["5", "6"]
    inside = [dataclasses.replace(s, in_thought=True) for s in out]
    assert vote(inside).answers == [None, "6"]
    assert csd.Vote().of(2)(out[:1]) is True
    assert csd.Vote().of(2)(inside[:1]) is False
    model, tokenizer = toy()
    with csd.Engine(model, tokenizer=tokenizer, kernels="reference") as drawing:
        for prompt, expected in [
            ("2?<think>\n", True),
            ("<think>a</think>2?", False),
            ("2?", False),
            ("<think>a</think><think>", True),
            ("[THINK]", True),
            ("</think>", False),
        ]:
            out = csd.generate(drawing, prompt, num_samples=2, max_new_tokens=2, seed=0)
            assert [s.in_thought for s in out] == [expected] * 2


def test_samples_after_a_cancelled_one_do_not_vote():
    out = [sample(0, "9"), sample(1, "3", "cancelled"), sample(2, "3"), sample(3, "3")]
    assert vote(out).answers == ["9"]
    assert csd.best_of(out, lambda s: s.index).scores == [0]


def test_weights_by_probability():
    out = [
        sample(0, "1", logprobs=[-2.0, -4.0]),
        sample(1, "1", logprobs=[-3.0]),
        sample(2, "2", logprobs=[-0.1, -0.3]),
    ]
    decided = vote(out, weight="probability")
    assert decided.answer == "2"
    assert decided.count == pytest.approx(math.exp(-0.2))
    assert decided.total == pytest.approx(math.exp(-0.2) + 2 * math.exp(-3))
    assert vote(out).answer == "1"


def test_errors_name_the_argument():
    with pytest.raises(
        ValueError, match=r"weight must return a finite number of at least 0, got -1\.0"
    ):
        vote([sample(0, "1")], weight=lambda s: -1)
    with pytest.raises(ValueError, match="weight must be a function"):
        vote([sample(0, "1")], weight="mean")
    with pytest.raises(ValueError, match="sample 3 has no text"):
        vote([sample(3, None)])
    with pytest.raises(ValueError, match=r"confidence must lie in \(0.5, 1\), got 0.5"):
        csd.Vote(confidence=0.5)
    with pytest.raises(ValueError, match="extract"):
        csd.Vote(extract="last")
    with pytest.raises(TypeError, match="samples must be the result of csd"):
        vote([[sample(0, "1")], [sample(0, "2")]])


def test_an_until_that_cannot_be_asked_is_refused_before_anything_is_drawn():
    bare = engine(PrefixSum())
    for until in (csd.Vote, "vote", 3):
        with pytest.raises(TypeError, match=r"until must be csd.Vote\(\) or a function .*got"):
            csd.generate(bare, [1], until=until)
    with pytest.raises(ValueError, match=r"until=csd.Vote\(\) needs a tokenizer"):
        csd.generate(bare, [1], until=csd.Vote())
    with pytest.raises(TypeError, match="callback must be a function, got 'print'"):
        csd.generate(bare, [1], callback="print")


# enough votes that every kind of tie and every order of arrival occurs
texts = st.lists(st.sampled_from(["1", "2", "3", "none"]), min_size=1, max_size=9)


@slow
@given(texts)
@settings(max_examples=300, deadline=None)
def test_a_settled_majority_is_that_of_all_samples_and_no_earlier_one_is(texts):
    out = [sample(i, t) for i, t in enumerate(texts)]
    n = len(out)
    until = csd.Vote().of(n)
    used = next(k for k in range(1, n + 1) if until(out[:k]))
    assert vote(out[:used]).answer == vote(out).answer
    assert used >= csd.Vote().least(n)
    # one sample less leaves some end that would change the answer
    before = out[: used - 1]
    if before:
        ends = itertools.product(["1", "2", "3", "4", "none"], repeat=min(n - used + 1, 4))
        rest = n - used + 1
        answers = {
            vote(before + [sample(0, t) for t in (end * rest)[:rest]]).answer for end in ends
        }
        assert len(answers) > 1


def test_each_text_is_read_once():
    read = []
    out = [sample(i, str(i)) for i in range(8)]
    until = csd.Vote(lambda text: read.append(text) or text).of(8)
    for n in range(1, 9):
        until(out[:n])
    assert read == [s.text for s in out]


def test_confidence_is_the_beta_test():
    from scipy.stats import beta

    for a, b in [(1, 0), (4, 0), (3, 1), (9, 4), (5, 5)]:
        out = [sample(i, "1") for i in range(a)] + [sample(i, "2") for i in range(b)]
        p = float(beta.sf(0.5, a + 1, b + 1))
        for level, stops in [(p - 1e-9, True), (p + 1e-9, False)]:
            if level > 0.5:
                assert csd.Vote(confidence=level).decided(out, 1000) is stops
    assert csd.Vote(confidence=0.95).least(16) == 4
    assert csd.Vote(confidence=0.95).least(3) == 2


@pytest.fixture(scope="module")
def drawing():
    """One call's options, and all its samples without stopping early."""
    options = dict(num_samples=9, max_new_tokens=24, seed=3, stop_token_ids=[0, 1, 2, 3])
    model = PrefixSum(sharpness=2.0)
    full = csd.generate(engine(model, Letters()), "ab", **options)
    return model, options, full


def few_answers(text):
    return "xy"[len(text) % 4 == 0] if text else None


@pytest.mark.parametrize("until", [csd.Vote(few_answers), csd.Vote(few_answers, confidence=0.7)])
def test_the_decision_is_the_same_for_every_draft_budget_and_batch(drawing, until):
    model, options, full = drawing
    used = next(k for k in range(1, 10) if until.decided(list(full)[:k], 9))
    assert used < 9
    finished_beyond = 0
    for slots, running in [
        (1, dict(budget=8)),
        (2, dict(budget=0)),
        (3, dict(speculate=False)),
        (5, dict(budget=40)),
        (9, dict(budget=16)),
        (9, dict(budget=16, drafter="prompt-lookup")),
    ]:
        e = engine(model, Letters(), max_slots=slots)
        out = csd.generate(e, "ab", until=until, **options, **running)
        assert out.finish_reasons == full.finish_reasons[:used] + ["cancelled"] * (9 - used)
        assert out.tokens[:used] == full.tokens[:used]
        assert vote(out, few_answers) == vote(list(full)[:used], few_answers)
        # as far as they went, cancelled samples are the ones plain sampling draws
        for cut, whole in zip(out.tokens[used:], full.tokens[used:], strict=True):
            assert cut == whole[: len(cut)]
        finished_beyond += sum(
            s.finish_reason != "cancelled" and s.index >= used
            for _, s in csd.stream(e, "ab", until=until, **options, **running)
        )
    # some batches had samples finished that the decision must not use
    assert finished_beyond


def test_samples_that_all_finish_in_one_step_are_asked_about_in_turn():
    model = PrefixSum(sharpness=2.0)
    options = dict(num_samples=6, max_new_tokens=5, seed=1, ignore_eos=True, budget=0)
    for slots in (1, 6):
        asked = []
        out = csd.generate(
            engine(model, Letters(), max_slots=slots),
            ["ab", "c"],
            until=lambda prefix, asked=asked: asked.append(len(prefix)) or len(prefix) == 4,
            **options,
        )
        assert sorted(asked) == [1, 1, 2, 2, 3, 3, 4, 4]
        for result in out:
            assert result.finish_reasons == ["length"] * 4 + ["cancelled"] * 2


def test_traces_can_be_recorded_while_stopping_early(drawing, tmp_path):
    model, options, _ = drawing
    path = tmp_path / "traces.jsonl"
    e = engine(model, Letters(), max_slots=2)
    csd.generate(e, "ab", until=csd.Vote(few_answers), record=path, **options)
    assert path.read_text().count("\n") == 1


def test_the_example_of_self_consistency(capsys):
    model, tokenizer = toy()
    drawn = main_of("self_consistency.py")(model, tokenizer, samples=6, tokens=30)
    csd.release()
    answers = {name: vote(out).answer for name, out in drawn.items()}
    assert answers["until decided"] == answers["all samples"]
    printed = capsys.readouterr().out
    assert f"all samples: {vote(drawn['all samples'])}" in printed
    assert "the likeliest a token" in printed


def test_decisions_are_printed_with_their_share():
    def shown(*texts, **options):
        return str(vote([sample(i, text) for i, text in enumerate(texts)], **options))

    assert shown("5", "5", "3", "?") == "5 (2 of 3 votes, 67%, 1 of 4 samples without an answer)"
    assert shown("5", "5") == "5 (2 of 2 votes, 100%)"
    assert shown("1", "2", "3", "4") == "no majority: 1 has 1 of 4 votes, as many as another answer"
    assert shown("1", "2", "2", "1").startswith("no majority: 1 has 2 of 4")
    assert shown("?", "?") == "no answer in 2 samples"
    weighted = shown("1", "2", weight=lambda s: 0.25 + s.index)
    assert weighted == "2 (1.25 of 1.50 votes, 83%)"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("$5", "5%"),
        (r"\$5", r"5\%"),
        ("£5", "€5"),
        ("5 dollars", "5 cents"),
        ("5 hours", "5 minutes"),
        (r"5\text{ hours}", r"5\text{ min}"),
        (r"2.5\,\mathrm{km}", r"\frac{5}{2}\text{ m}"),
        ("x=3", "y=3"),
        ("x_1 = 3", "x_{2} = 3"),
        ("90^\\circ", "90 percent"),
        ("1,000 square miles", r"1000\text{ m}^2"),
        ("-$5", "-5 hours"),
    ],
)
def test_units_and_names_that_differ_are_two_answers(one, other):
    """In boxes and in sentences, for votes and while samples are drawn."""
    number = re.search(r"\d[\d,.]*", one.rpartition("=")[2])[0]
    for form in (r"So \boxed{%s}.", "The answer is %s.", r"<answer>%s</answer>"):
        texts = [form % text for text in (one, other, one, other, one)]
        decided = vote([sample(i, text) for i, text in enumerate(texts)])
        assert (decided.count, decided.second) == (3, 2), decided.answers
        assert len({*decided.answers}) == 2
        assert len({canonical(answer) for answer in decided.answers}) == 1
        # without a unit it is the first of them
        bare = "-5" if one[0] == "-" else number
        texts = [form % text for text in (bare, one, bare, other, other)]
        decided = vote([sample(i, text) for i, text in enumerate(texts)])
        assert (decided.count, decided.second) == (3, 2), decided.answers


@pytest.mark.parametrize(
    "same",
    [
        ["5 hours", "5", "5 hrs", r"5\text{ hours}", r"5\text{ h}"],
        ["$5", "5 dollars", "5", r"\$5.00", "5 USD"],
        ["12 apples", "12", "12 fruits", "12 pieces"],
        ["x=3", "3", "$x = 3$"],
        ["f(x)=3x", "y=3x", "3x"],
        ["25%", r"25\%", "25", "25 percent"],
        ["12 cm", "12 cm^2", "12 square cm", "12 centimeters"],
    ],
)
def test_units_that_are_one_answer(same):
    for form in (r"So \boxed{%s}.", "The answer is %s."):
        decided = vote([sample(i, form % text) for i, text in enumerate(same)])
        assert (decided.count, decided.second) == (len(same), 0), decided.answers


@given(st.data())
def test_a_decision_holds_whatever_units_follow(data):
    answers = ["5 hours", "5 minutes", "5", "x=5", "y=5", "6", "6 hours", "7%"]
    texts = data.draw(st.lists(st.sampled_from(answers), min_size=1, max_size=9))
    out = [sample(i, rf"\boxed{{{text}}}") for i, text in enumerate(texts)]
    whole = vote(out)
    for n in range(1, len(out) + 1):
        if csd.Vote().decided(out[:n], len(out)):
            assert vote(out[:n]).answer == whole.answer
    assert csd.Vote().decided(out, len(out))


def test_a_function_that_extracts_no_text_is_named():
    with pytest.raises(TypeError, match="extract must return a str or None, got 3 of type int"):
        vote([sample(0, "3")], extract=int)
