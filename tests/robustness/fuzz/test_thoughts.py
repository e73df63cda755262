"""Thoughts whose tags join with the text around them, against a search in the joined bytes."""

import random

import pytest
import torch
from helpers.models.text_tokenizers import tokenizer_of
from helpers.runs.fuzzing import cases

from csd.engine.options.params import SamplingParams
from csd.engine.options.thinking import ThinkingBudget, forced_places, spell_tags, vocabulary
from csd.engine.requests.request import Request
from csd.engine.rules.tables import WordTree, asked_of, sizes_of, write_sets
from csd.kernels.verify.rules.rows import Prefixes, forced_tokens
from csd.state.logit_rules import Rules

BEGIN, END = b"<think>", b"</think>"
PARTS = [
    BEGIN,
    BEGIN,
    END,
    END,
    b"<think>\nFirst (",
    b").</think>The answer",
    b"<th",
    b"</th",
    b"<",
    b">",
    b"or last",
    b" ",
    b"\n\n",
    b"12",
    b"<<think>>",
    b"</</think>",
    "é".encode(),
    b"think",
    b"\nSo",
]
CLOSES = [None, "</think>", "\nSo </think>", ".</think>"]


def split_at_random(rng: random.Random, text: bytes, by_bytes: dict[bytes, int]) -> list[int]:
    """Tokens that join to the text, at each place any of those that fit."""
    tokens, at = [], 0
    while at < len(text):
        sizes = [n for n in range(1, min(12, len(text) - at + 1)) if text[at : at + n] in by_bytes]
        size = rng.choice(sizes)
        tokens.append(by_bytes[text[at : at + size]])
        at += size
    return tokens


def is_open(text: bytes, first: int) -> bool:
    """first: length of the prompt, of whose tags only a begin tag at its very end counts."""
    began, ended = (
        end if (end := text.rfind(tag) + len(tag)) > max(first, len(tag) - 1) else 0
        for tag in (BEGIN, END)
    )
    return began > ended if began or ended else text[:first].rstrip().endswith(BEGIN)


def begun(text: bytes, whole: bytes) -> int:
    return max((n for n in range(1, len(whole)) if text.endswith(whole[:n])), default=0)


def rows_of(
    tokens: list[list[int]], prompt: int, params: SamplingParams, vocab: int, opened: bool
) -> list[int]:
    """Forced tokens of rows by the rule of the step."""
    request = Request(0, [0] * prompt, params, range(1), 0, 0)
    asked = asked_of([request])
    tree = WordTree.of([])
    sizes = sizes_of([request], asked, [tree])
    rules = Rules.empty_of(
        1,
        vocab,
        sets=1,
        prompt=prompt,
        words=(sizes.edges, sizes.ends, sizes.word, sizes.hits),
        marks=sizes.marks,
        tags=(sizes.symbols, sizes.steps),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    rules.opened.fill_(opened)
    write_sets(rules, {0: (params, tree)})
    longest = max(map(len, tokens))
    padded = torch.tensor([row + [-1] * (longest - len(row)) for row in tokens])
    prefix = Prefixes(padded, torch.tensor([len(row) for row in tokens]), prompt)
    return forced_tokens(prefix, torch.zeros(len(tokens), dtype=torch.int64), rules).tolist()


@pytest.mark.parametrize("close", CLOSES, ids=str)
def test_tags_in_the_text_open_close_and_cut_thoughts(close):
    tokenizer = tokenizer_of("joining")
    vocab = len(tokenizer)
    read = vocabulary(tokenizer, vocab)
    by_bytes = {x: t for t, x in read.items()}
    given = ("<think>", "</think>") if close is None else ("<think>", "</think>", close)
    tags = spell_tags(given, tokenizer, vocab)
    canonical = [read[t] for t in tags[2]]
    assert b"".join(canonical) == given[-1].encode()
    joins, cuts, completed = 0, 0, 0
    for case in cases(60, 2500):
        rng = random.Random(case)
        most = rng.choice([0, 1, 4, 9])
        prompt, own = (
            split_at_random(rng, b"".join(rng.choices(PARTS, k=rng.randint(1, n))), by_bytes)
            for n in (4, 9)
        )
        text, tokens = b"".join(read[t] for t in prompt), [*prompt]
        first = len(text)
        opened = is_open(text, first)
        budget, spent, rows, want = ThinkingBudget(tags, most, prompt, opened), 0, [], []
        pending: bytes | None = None  # the rest of what is being forced
        for token in own * 2:
            inside = is_open(text, first)
            assert budget.open == inside, (case, text)
            forced = budget.forced()
            assert (forced >= 0) == (inside and spent >= most)
            rows.append([*tokens])
            want.append(forced)
            if forced >= 0:
                cuts += pending is None
                if pending is None:
                    done = max(
                        (k for k in range(1, len(canonical)) if tokens[-k:] == [*tags[2][:k]]),
                        default=0,
                    )
                    at = begun(text, END)
                    completed += bool(at and not done)
                    pending = END[at:] if at and not done else b"".join(canonical[done:])
                assert pending.startswith(read[forced]), (case, text, pending)
                pending = pending[len(read[forced]) :]
                token = forced
            spent += inside
            text += read[token]
            tokens.append(token)
            budget.push(token)
            if pending == b"":
                assert text.endswith(END) and not is_open(text, first)
            if not is_open(text, first):
                pending = None
            joins += read[token][:1] == b">" and len(read[token]) > 1
        assert (
            rows_of(
                rows,
                len(prompt),
                SamplingParams(
                    temperature=1.0,
                    max_new_tokens=9,
                    max_thinking_tokens=most,
                    thinking_tags=tags,
                ),
                vocab,
                opened,
            )
            == want
        )
        budget = ThinkingBudget(tags, most, prompt, opened)
        assert forced_places(budget, tokens[len(prompt) :]) == [t >= 0 for t in want]
    assert joins > 20 and cuts > 20 and completed


def test_a_special_token_is_compared_with_tokens():
    """Its text, spelled in pieces, ends nothing."""
    tokenizer = tokenizer_of("joining")
    begin, end, close = spell_tags(("<|user|>", "<|end|>"), tokenizer, len(tokenizer))
    assert begin.text is None and end.text is None and close == end.ids
    budget = ThinkingBudget((begin, end, close), 9, [*begin.ids], True)
    for byte in b"<|end|>":
        budget.push(tokenizer.convert_tokens_to_ids(chr(byte)))
    assert budget.open
    budget.push(end.ids[0])
    assert not budget.open
