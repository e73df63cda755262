"""Sessions: turns, appended tokens and forks are functions of seed, path and text; and replays."""

import asyncio
import re
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.models import checkpoints
from helpers.models.scripted import Letters, PrefixSum, engine
from helpers.oracles.oracle import choose, key_of
from transformers import GenerationConfig

import csd
from csd.engine.session import seed_of
from csd.engine.step.step import Step
from csd.graph import consensus
from csd.models.demo import toy
from csd.models.load import load

PROMPT = [(7 * i + 3) % 61 for i in range(150)]
ASKED = dict(max_new_tokens=12, temperature=0.9, end_token_ids=[])


@pytest.fixture(scope="module")
def exact():
    loaded = load(checkpoints.build("llama", dtype=torch.float32))
    loaded.module = None
    with csd.Engine(loaded, exact=True, max_slots=8) as made:
        yield made


def play(session, sample, **options):
    """Turns with a fork, appended tokens and a closed branch; returns all branches' texts."""
    sample(**ASKED, **options)
    session[1].append([5, 6, 7])
    session[2].close()
    session[0].fork(2)[1].append([9])
    sample(**ASKED, **options)
    session[3].fork()
    sample(**ASKED, **options)
    return [(branch.path, branch.tokens, branch.logprobs) for branch in session]


@pytest.fixture(scope="module")
def played(exact):
    session = exact.session(PROMPT, num_samples=3, seed=4)
    return play(session, session.sample)


def test_the_first_turn_is_generate(exact, played):
    want = exact.generate(PROMPT, num_samples=3, seed=4, **ASKED)
    assert [tokens[:12] for _, tokens, _ in played[:3]] == want.tokens


@pytest.mark.parametrize(
    "options", [dict(speculate=False), dict(budget=9), dict(budget="auto"), dict(top_logprobs=2)]
)
def test_a_replay_has_the_same_bits(exact, played, options):
    exact.release()
    session = exact.session(PROMPT, num_samples=3, seed=4)
    assert play(session, session.sample, **options) == played


def test_branches_alone_draw_what_they_draw_together(exact, played):
    """One after another, with other branches left out."""
    session = exact.session(PROMPT, num_samples=3, seed=4)
    session.sample([session[1]], **ASKED)
    session[1].append([5, 6, 7])
    session.sample([session[1]], **ASKED)
    session.sample([session[1]], **ASKED)
    assert (session[1].path, session[1].tokens, session[1].logprobs) == played[1]
    assert not session[0].tokens


def test_another_engine_without_reuse_draws_the_same(played):
    loaded = load(checkpoints.build("llama", dtype=torch.float32))
    loaded.module = None
    with csd.Engine(loaded, exact=True, max_slots=2, prefix_cache=False) as plain:
        session = plain.session(PROMPT, num_samples=3, seed=4)
        assert play(session, session.sample) == played


def test_an_async_engine_draws_the_same(exact, played):
    with csd.AsyncEngine(exact, max_tokens=512) as service:
        session = service.session(PROMPT, num_samples=3, seed=4)

        def sample(**options):
            asyncio.run(session.sample(**options))

        assert play(session, sample) == played
        assert session.cached_tokens > session.read_tokens


def test_turns_of_branches_run_at_once(exact, played):
    async def both(session):
        await session.sample(**ASKED)
        session[1].append([5, 6, 7])
        # branch 0 draws two turns while branch 1 waits for its tool
        for _ in range(2):
            await session.sample([session[0]], **ASKED)
        one = session.sample([session[1]], **ASKED)
        two = session.sample([session[2]], **ASKED)
        await asyncio.gather(one, two)
        return [branch.tokens for branch in session]

    with csd.AsyncEngine(exact, max_tokens=512) as service:
        found = asyncio.run(both(service.session(PROMPT, num_samples=3, seed=4)))
    assert found[0] == played[0][1]
    assert found[1] == played[1][1][:27]


def test_tokens_are_those_of_a_loop_over_the_script():
    """A target whose next token is known: the noise is that of (seed of the path, text), index."""
    target = PrefixSum()
    with engine(target, max_slots=4) as made:
        session = made.session([5, 6], num_samples=2, seed=9)
        session.sample(max_new_tokens=5, ignore_eos=True)
        session[1].append([1, 2])
        fork = session[1].fork(2)[1]
        session.sample(max_new_tokens=4, ignore_eos=True)

    def turn(text, path, count):
        key, found = key_of(seed_of(9, path[:-1]), text), []
        for position in range(count):
            logits = target.next_logits(text + found).numpy()
            found.append(choose(logits, key, position, path[-1], 1.0)[0])
        return found

    first = turn([5, 6], (1,), 5)
    assert session[1].tokens[:7] == [*first, 1, 2]
    text = [5, 6, *first, 1, 2]
    assert session[1].tokens[7:] == turn(text, (1,), 4)
    assert fork.path == (1, 1) and fork.tokens[7:] == turn(text, (1, 1), 4)


def test_forks_of_equal_texts_differ_and_do_not_depend_on_later_forks(exact):
    session = exact.session(PROMPT, num_samples=2, seed=1)
    forks = session[0].fork(2) + session[1].fork(2) + session[0].fork(1)
    assert [branch.path for branch in forks] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    session.sample(**ASKED)
    texts = [tuple(branch.tokens) for branch in session]
    assert len({*texts}) == len(texts)
    other = exact.session(PROMPT, num_samples=2, seed=1)
    alone = other[0].fork(2)[1]
    other.sample([alone], **ASKED)
    assert alone.tokens == forks[1].tokens


def test_each_token_is_read_once_but_for_pages(exact):
    exact.release()
    session = exact.session(PROMPT, num_samples=4, seed=2)
    for turn in range(4):
        session.sample(**ASKED)
        for branch in session:
            branch.append([turn] * 20)
    # each branch's text is read from the last whole page on; the prompt once
    texts = len(PROMPT) + sum(len(branch.tokens) for branch in session)
    assert session.read_tokens <= texts + 4 * 4 * 64
    assert session.cached_tokens >= 3 * 4 * 128


def test_branches_of_a_turn_are_groups_of_one_graph(exact, monkeypatch):
    """Four texts that differ in a token: four prompts, one key, and what they share once in it."""
    session = exact.session(PROMPT, num_samples=4, seed=2)
    for branch in session:
        branch.append([branch.path[0], *range(40)])
    keys, groups, entered = set(), set(), []
    launch, insert = Step.launch, consensus.insert_prompt

    def launched(step, *given):
        slots = step.slots
        keys.update(slots.group_key[slots.group_key >= 0].tolist())
        groups.update(slots.group[slots.live].tolist())
        return launch(step, *given)

    def inserted(table, key, tokens, live, config, op, first=0):
        entered.append(len(tokens) - 1 - first)
        return insert(table, key, tokens, live, config, op, first)

    monkeypatch.setattr(Step, "launch", launched)
    monkeypatch.setattr(consensus, "insert_prompt", inserted)
    session.sample(**ASKED)
    assert len(keys) == 1 and len(groups) == 4
    # tokens that follow others: the prompt's and 41 more, then 41 of each other text
    assert sum(entered) == len(PROMPT) - 1 + 4 * 41


def test_live_branches_are_those_that_did_not_end():
    model, tokenizer = toy()
    with csd.Engine(model.double(), tokenizer=tokenizer, prefill_chunk=64) as made:
        session = made.session("hello", num_samples=3, seed=0)
        session.sample(max_new_tokens=4, end_token_ids=[*range(20, 36)])
        ended = [branch for branch in session if branch.spans[-1].sample.finish_reason == "stop"]
        assert ended and session.live == [b for b in session if b not in ended]
        ended[0].append(" tool says 4")
        assert ended[0] in session.live
        assert ended[0].text.endswith(" tool says 4")
        flags = ended[0].sampled
        assert flags[-12:] == [False] * 12 and all(flags[:-12])
        assert [x is None for x in ended[0].logprobs] == [not flag for flag in flags]
        with pytest.raises(TypeError, match="num_samples"):
            session.sample(num_samples=2)
        with pytest.raises(ValueError, match="append"):
            ended[0].append([10**6])
        with pytest.raises(ValueError, match="num_samples"):
            ended[0].fork(0)


PAGE = Path(__file__).parents[3] / "docs" / "sessions.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
# lines of the module's docstring
SHOWN = re.search(r"(?:^    .*\n)+", csd.engine.session.__doc__, re.MULTILINE)[0]
EXAMPLES = {"page": BLOCKS[0], "docstring": "engine = csd.Engine(model)\n" + textwrap.dedent(SHOWN)}


@pytest.fixture
def tools():
    """The premise of the examples: a model of letters, which ends some turns at "b" and some
    at the end token "c", and a tool that notes for which texts it was called."""
    model = PrefixSum(vocab=len(Letters.alphabet))
    ends = GenerationConfig(eos_token_id=Letters.alphabet.index("c"))
    made = engine(model, tokenizer=Letters(), generation_config=ends, max_slots=8)
    called = []

    def run_tool(text):
        called.append(text)
        return " ok"

    async def run_tool_later(text):
        return run_tool(text)

    class Given:
        Engine = staticmethod(lambda _: made)

    names = dict(csd=Given, model=None, prompt="hello", engine=made)
    yield names | dict(run_tool=run_tool, run_tool_later=run_tool_later, called=called)
    made.release()


def run(code, names):
    """Run an example whose calls end at "b", of turns that are cut after 12 tokens."""
    changed = code.replace('"</call>"', '"b"').replace("200", "12")
    assert changed.count('"b"') and changed.count("12") >= 2
    exec(changed, names)


@pytest.mark.parametrize("place", EXAMPLES)
def test_an_example_calls_the_tool_for_the_branches_that_asked(place, tools):
    run(EXAMPLES[place], tools)
    session = tools["session"]
    first = [branch.spans[0].sample for branch in session][:8]
    asked = [sample for sample in first if sample.stop_reason == "b"]
    # one and more of each kind: asked, cut, and ended
    assert {s.finish_reason for s in first if s not in asked} == {"length", "stop"} and asked
    assert tools["called"] == [Letters().decode(s.tokens) for s in asked]
    for branch, sample in zip([*session][:8], first, strict=True):
        answered = [span.tokens for span in branch.spans if span.sample is None]
        assert bool(answered) == (sample.stop_reason == "b")
        # ended ones stay as they are, and the others go on
        assert len(branch.spans) == 1 + (sample.finish_reason == "length") + 2 * bool(answered)


def test_the_asynchronous_example_ends_and_calls_the_tool_at_each_stop(tools):
    with csd.AsyncEngine(tools["engine"], max_tokens=512) as service:
        tools["session"] = session = service.session("hello", num_samples=8, seed=0)
        run(BLOCKS[1], tools)

        async def play_all():
            await asyncio.wait_for(asyncio.gather(*map(tools["play"], session)), 60)

        asyncio.run(play_all())
    assert tools["called"]
    for branch in session:
        turns = [span.sample for span in branch.spans if span.sample is not None]
        answers = len(branch.spans) - len(turns)
        stops = [sample.stop_reason == "b" for sample in turns]
        # every call but those behind the most that the example makes has an answer
        assert answers == min(sum(stops), 8) and all(stops[:answers])
        assert not branch.waiting or answers == 8


def test_branches_wait_from_a_stop_string_to_an_answer(tools):
    session = tools["engine"].session("hello", num_samples=24, seed=0)
    assert not session.waiting and session[0].stopped_by is None
    session.sample(stop=["b", "d"], max_new_tokens=3)
    asked = [b for b in session if b.spans[-1].sample.stop_reason in ("b", "d")]
    assert session.waiting == asked and {b.stopped_by for b in asked} == {"b", "d"}
    ended = [b for b in session if b.stopped_by == Letters.alphabet.index("c")]
    cut = [b for b in session if b.stopped_by is None]
    assert len(ended) + len(cut) + len(asked) == 24 and ended and cut
    assert session.live == cut
    assert repr(session) == (
        f"<csd.Session of 24 branches, {len(cut)} live, {len(asked)} waiting; "
        f"{session.read_tokens} tokens read, {session.cached_tokens} cached>"
    )
    asked[0].append("a")
    asked[1].close()
    assert session.waiting == asked[2:] and asked[0].stopped_by is None


def test_text_needs_a_tokenizer():
    model, tokenizer = toy()
    with csd.Engine(model) as made:
        session = made.session([1, 2, 3], num_samples=1, seed=0)
        session.sample(max_new_tokens=4, ignore_eos=True)
        with pytest.raises(ValueError, match="text needs a tokenizer: make the engine with"):
            _ = session[0].text
    with csd.Engine(model, tokenizer=tokenizer) as made:
        session = made.session([1, 2, 3], num_samples=1, seed=0)
        session.sample(max_new_tokens=4, ignore_eos=True)
        assert session[0].text == tokenizer.decode(session[0].tokens)
