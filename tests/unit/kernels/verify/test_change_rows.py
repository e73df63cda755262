"""Rows that rules change, against each row's own prefix in a loop."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.checks.live_bytes import LiveBytes
from helpers.oracles import oracle

from csd.engine.options import SamplingOptions
from csd.engine.options.logit_params import WORD_TOKENS, WORDS_TOKENS
from csd.engine.options.params import SamplingParams
from csd.engine.options.thinking import ThinkingBudget, forced_places
from csd.engine.requests.request import Request
from csd.engine.requests.slot_edits import Refill, fill_slots
from csd.engine.rules.changes import Changes
from csd.kernels.verify.reference_rows import row_logits
from csd.kernels.verify.rules import rows as row_rules
from csd.kernels.verify.rules.rows import change_rows, only, path_tokens
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.utils.arguments import checked

VOCAB, SLOTS, LONGEST = 37, 5, 24
ENDS = (7, 9)
RULES = {
    "nothing": {},
    "bias": dict(logit_bias=((3, 2.5), (4, -math.inf), (36, -1.0))),
    "words": dict(bad_words=((5,), (1, 2), (2, 1, 2), (3, 3, 3, 3))),
    "allowed": dict(allowed_token_ids=(1, 2, 3, 30)),
    "suppressed": dict(suppress_tokens=(0, 36)),
    "ngram-1": dict(no_repeat_ngram_size=1),
    "ngram-2": dict(no_repeat_ngram_size=2),
    "ngram-4": dict(no_repeat_ngram_size=4),
    "counts": dict(frequency_penalty=0.7, presence_penalty=-0.4),
    "early": dict(min_new_tokens=6, suppress_tokens=(1,)),
    "penalty": dict(repetition_penalty=1.7, logit_bias=((2, 1.0),)),
    "thought": dict(max_thinking_tokens=3, thinking_tags=((1,), (2,), (2,))),
    "long-thought": dict(max_thinking_tokens=0, thinking_tags=((1, 2), (3,), (2, 1, 2, 3))),
    "all": dict(
        logit_bias=((3, 2.5),),
        bad_words=((1, 3),),
        suppress_tokens=(30,),
        no_repeat_ngram_size=3,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        repetition_penalty=1.2,
        min_new_tokens=4,
        max_thinking_tokens=5,
        thinking_tags=((1,), (3, 2), (3, 2)),
    ),
}


def random_pool(slots, generator):
    """Trees of up to seven nodes a slot, some rows of padding behind them."""
    rows = []
    start = [0] * SLOTS
    nodes = [0] * SLOTS
    for s in range(SLOTS):
        start[s] = len(rows)
        nodes[s] = int(torch.randint(1, 8, (), generator=generator))
        for i in range(nodes[s]):
            up = -1 if i == 0 else int(torch.randint(i, (), generator=generator))
            token = int(torch.randint(1, 5, (), generator=generator))
            token = int(slots.context[s, 0]) if i == 0 else token
            depth = 0 if i == 0 else rows[start[s] + up][3] + 1
            above = 0 if i == 0 else rows[start[s] + up][4]
            rows.append((token, start[s] + up if i else -1, s, depth, above | 1 << i))
    pool = Pool.empty(len(rows) + 3, SLOTS, SLOTS, 8)
    for m, (token, parent, s, depth, above) in enumerate(rows):
        pool.token[m], pool.parent[m], pool.slot[m] = token, parent, s
        pool.depth[m], pool.ancestors[m] = depth, above
    pool.slot_start.copy_(torch.tensor(start))
    pool.slot_nodes.copy_(torch.tensor(nodes))
    return pool


def prepared(names, generator, static=False):
    """Slots in the middle of samples with the named rules, their changes and all tokens of each."""
    slots = Slots.empty(SLOTS, VOCAB, LONGEST, 8, torch.float64)
    pages = torch.zeros(SLOTS, 1, dtype=torch.int32)
    requests, refills, snapshots = [], [], []
    for s, name in enumerate(names):
        length = int(torch.randint(1, 12, (), generator=generator))
        prompt = torch.randint(1, 5, (length,), generator=generator).tolist()
        params = SamplingParams(max_new_tokens=LONGEST, end_ids=ENDS, **RULES[name])
        request = Request(s, prompt, params, range(1), 0, s)
        request.place.group = s
        request.find_thought(None)
        requests.append(request)
        refills.append(Refill(s, request, 0, [0]))
    changes = Changes.of_call(requests, slots, VOCAB, None, static)
    # what another sample left
    slots.tokens.fill_(3)
    fill_slots(slots, pages, refills)
    changes.fill(refills)
    for s, request in enumerate(requests):
        count = int(torch.randint(0, 12, (), generator=generator))
        tokens = torch.randint(1, 5, (count,), generator=generator)
        slots.tokens[s, :count] = tokens
        slots.generated[s] = count
        for t in tokens.tolist():
            slots.context[s] = torch.cat([torch.tensor([t]), slots.context[s, :-1]])
            if request.params.repetition_penalty != 1:
                slots.seen[s, t // 32] |= 1 << t % 32
        snapshots.append((request.prompt, tokens.tolist()))
    return slots, changes, snapshots, requests


def paths_of(pool, m):
    path = []
    while m >= 0 and pool.depth[m] > 0:
        path.insert(0, int(pool.token[m]))
        m = int(pool.parent[m])
    return path


def in_a_loop(logits, prompt, sample, params):
    """The oracle's processors, of one row."""
    given = {
        name: getattr(params, name)
        for name in (
            "allowed_token_ids",
            "bad_words",
            "suppress_tokens",
            "no_repeat_ngram_size",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_new_tokens",
            "max_thinking_tokens",
            "thinking_tags",
        )
    } | dict(logit_bias=dict(params.logit_bias), temperature=1)
    process = oracle.processors(len(prompt), VOCAB, given, ENDS)
    return process(torch.tensor([prompt + sample]), logits[None].clone())[0]


def random_words(count, longest):
    """Sequences over four tokens, most of which end some prefix, and two much longer ones."""
    drawn = random.Random(count)
    words = [tuple(drawn.choices(range(1, 5), k=drawn.randint(2, longest))) for _ in range(count)]
    return tuple({*words, (1, 36), (2,) * 40, tuple(drawn.choices(range(1, 5), k=60))})


RULES |= {f"words-{n}": dict(bad_words=random_words(n, 6)) for n in (40, 700)}


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("hits", [1, 64])
def test_banned_sequences_are_each_sets_own(monkeypatch, hits, static):
    monkeypatch.setattr(row_rules, "HITS", hits)
    generator = torch.Generator().manual_seed(hits)
    banned = 0
    for names in (["words-40"] * SLOTS, ["words-700", "words", "nothing", "words-40", "bias"]):
        slots, changes, snapshots, requests = prepared(names, generator, static)
        pool = random_pool(slots, generator)
        logits = torch.randn(pool.rows, VOCAB, generator=generator, dtype=torch.float64)
        longest = None if static else int(slots.generated.max())
        with NoHostReads():
            x, _ = change_rows(logits, pool, slots, changes.rules, changes.asked, longest)
        for m in range(pool.rows - 3):
            s = int(pool.slot[m])
            prompt, tokens = snapshots[s]
            want = in_a_loop(logits[m], prompt, tokens + paths_of(pool, m), requests[s].params)
            assert torch.equal(x[m], want)
            banned += int((want == -math.inf).sum())
    assert banned > 50


def test_tables_of_banned_sequences_take_their_tokens_alone():
    """One sequence of the largest length and many short ones, which a rectangle would multiply."""
    rest = WORDS_TOKENS - WORD_TOKENS
    many = tuple((i % VOCAB, i // VOCAB % VOCAB, i // VOCAB**2) for i in range(rest // 3))
    slots = Slots.empty(SLOTS, VOCAB, LONGEST, 8, torch.float64)
    params = SamplingParams(bad_words=(*many, (1,) * WORD_TOKENS))
    with LiveBytes() as live:
        changes = Changes.of_call([Request(0, [1], params, range(1), 0, 0)], slots, VOCAB, None, 0)
    rules = changes.rules
    assert rules.word_edges.nelement() + rules.word_ends.nelement() <= 2 * WORDS_TOKENS
    assert live.peak < 64 * WORDS_TOKENS
    for words, limit in (((1,) * (WORD_TOKENS + 1),), WORD_TOKENS), (many + many, WORDS_TOKENS):
        with pytest.raises(ValueError, match=f"bad_words must have at most {limit} tokens"):
            checked(SamplingOptions, "bad_words", words)


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize(
    "names",
    [[name] * SLOTS for name in RULES if name != "nothing"]
    + [
        ["nothing", "bias", "thought", "ngram-2", "all"],
        ["words", "counts", "early", "nothing", "long-thought"],
    ],
    ids="-".join,
)
def test_every_row_is_changed_as_its_own_prefix_asks(names, static):
    generator = torch.Generator().manual_seed(len(names[0]) + 10 * static)
    for _ in range(4):
        slots, changes, snapshots, requests = prepared(names, generator, static)
        pool = random_pool(slots, generator)
        logits = torch.randn(pool.rows, VOCAB, generator=generator, dtype=torch.float64) * 3
        before = logits.clone()
        longest = None if static else int(slots.generated.max())
        with NoHostReads():
            x, forced = change_rows(logits, pool, slots, changes.rules, changes.asked, longest)
            if forced is not None:
                only(x, forced)
        assert torch.equal(logits, before)
        # verification applies a penalty that nothing follows
        every = torch.arange(pool.rows)
        x = row_logits(x, every, pool, changes.without_rules(slots))
        for m in range(pool.rows - 3):
            s = int(pool.slot[m])
            prompt, tokens = snapshots[s]
            sample = tokens + paths_of(pool, m)
            want = in_a_loop(logits[m], prompt, sample, requests[s].params)
            assert torch.equal(x[m], want), (names[s], prompt, sample)


def test_blocks_of_rows_are_alike(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    slots, changes, *_ = prepared(["all"] * SLOTS, generator)
    pool = random_pool(slots, generator)
    logits = torch.randn(pool.rows, VOCAB, generator=generator, dtype=torch.float64)
    whole = change_rows(logits, pool, slots, changes.rules, changes.asked)
    monkeypatch.setattr(row_rules, "BLOCK", 3)
    parts = change_rows(logits, pool, slots, changes.rules, changes.asked)
    assert torch.equal(whole.x, parts.x) and torch.equal(whole.forced, parts.forced)


def test_paths():
    generator = torch.Generator().manual_seed(0)
    slots, *_ = prepared(["bias"] * SLOTS, generator)
    pool = random_pool(slots, generator)
    found = path_tokens(pool, slice(0, pool.rows)).tolist()
    for m in range(pool.rows):
        path = paths_of(pool, m) if pool.slot[m] >= 0 else []
        assert found[m] == path + [-1] * (len(found[m]) - len(path))


def test_forced_places_are_those_of_the_rows():
    """The host marks a sample's tokens by reading it from its begin; rows read their prefixes."""
    generator = torch.Generator().manual_seed(5)
    tags, most = ((1, 2), (3,), (2, 1, 2, 3)), 2
    thought = oracle.Thought(0, [list(tag) for tag in tags], most)
    cut = 0
    for _ in range(60):
        prompt = torch.randint(1, 5, (4,), generator=generator).tolist()
        thought.prompt_len, tokens, want = len(prompt), [], []
        for free in torch.randint(1, 5, (20,), generator=generator).tolist():
            token = thought.only(prompt + tokens)
            want.append(token is not None)
            tokens.append(free if token is None else token)
        budget = ThinkingBudget(tags, most, prompt, prompt[-2:] == [1, 2])
        assert forced_places(budget, tokens) == want
        cut += any(want)
    assert 5 < cut < 60


def test_tensors_are_kept_where_they_fit():
    slots = SimpleNamespace(
        live=torch.zeros(2),
        logprobs=torch.zeros(1, dtype=torch.float64),
        count=2,
        group=torch.zeros(2),
    )

    def of_call(before, *names):
        requests = [
            Request(i, [1, 2], SamplingParams(**RULES[name]), range(1), 0, 0)
            for i, name in enumerate(names)
        ]
        return Changes.of_call(requests, slots, VOCAB, before, False)

    assert of_call(None, "nothing") is None
    first = of_call(None, "words")
    again = of_call(first, "words")
    assert again.rules is first.rules and again.key == first.key
    other = of_call(again, "counts")
    assert other.rules is first.rules and other.key != first.key
    # more rules than there are rows for
    more = of_call(other, "counts", "bias", "words")
    assert more.rules is not first.rules and more.serial != first.serial
    assert of_call(more, "thought", "words").rules.word_edges.shape[1] == 8
