"""Texts behind prompts, whole and streamed, against whole decodes, for tokens at random."""

import random

import pytest
from helpers.models.text_tokenizers import KINDS, SPECIAL, TEXT, tokenizer_of
from helpers.runs.fuzzing import cases

from csd.models.text.streamed import SampleText

CHUNKS = [
    *TEXT.splitlines(keepends=True),
    "é",
    "😀😀",
    "é" * 9,
    "\n    ",
    " ",
    "isn't",
    "ab,  c",
    "</s>",
]


def drawn_tokens(rng: random.Random, tokenizer) -> list[int]:
    """Tokens of texts and any tokens of the vocabulary, among them parts of characters."""
    tokens: list[int] = []
    for _ in range(rng.randint(0, 6)):
        kind, text = rng.random(), rng.choice(CHUNKS)
        if kind < 0.5:
            tokens += tokenizer(text, add_special_tokens=False)["input_ids"][: rng.randint(1, 30)]
        elif kind < 0.8:
            tokens += rng.choices(range(len(tokenizer)), k=rng.randint(1, 4))
        elif kind < 0.9:
            tokens += rng.choices([tokenizer.convert_tokens_to_ids(t) for t in SPECIAL], k=2)
        else:
            # whole and cut characters, of bytes where the vocabulary has them
            text = rng.choice(["é", "😀", "東京", "😀é"])
            tokens += tokenizer(text, add_special_tokens=False)["input_ids"][: rng.randint(1, 8)]
    return tokens


def cut(rng: random.Random, tokens: list[int]) -> list[int]:
    return tokens[: rng.randint(0, len(tokens))]


def streamed(tokenizer, prompt, tokens, skip, takes) -> tuple[str, str]:
    """The whole text of a sample, and its pieces joined; takes: after which tokens to take one."""
    text = SampleText(
        tokenizer, (), include_stop=False, skip_special_tokens=skip, streams=True, prompt=prompt
    )
    pieces = ""
    for token, take in zip(tokens, takes, strict=True):
        text.push(token)
        pieces += text.take() if take else ""
    whole, rest = text.finish(by_token=False)
    return whole, pieces + rest


@pytest.mark.parametrize("bos", [False, True], ids=["without BOS", "with BOS"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompts_text_and_a_samples_text_join_to_that_of_all_tokens(kind, bos):
    tokenizer = tokenizer_of(kind, bos)
    joined = 0
    for case in cases(150, 1250):
        rng = random.Random(case)
        prompt = [tokenizer.bos_token_id] if bos else []
        prompt += drawn_tokens(rng, tokenizer)
        tokens, skip = drawn_tokens(rng, tokenizer), rng.random() < 0.6
        before = tokenizer.decode(prompt, skip_special_tokens=skip)
        both = tokenizer.decode(prompt + tokens, skip_special_tokens=skip)
        rate = rng.choice([1.0, 0.4])
        takes = [rng.random() < rate for _ in tokens]
        whole, pieces = streamed(tokenizer, prompt, tokens, skip, takes)
        # a character that the prompt's end leaves incomplete belongs to the text
        same = next((i for i, c in enumerate(before) if both[i : i + 1] != c), len(before))
        assert whole == both[same:], (case, prompt, tokens)
        assert pieces == whole, (case, prompt, tokens)
        joined += both == before + whole
    assert joined
