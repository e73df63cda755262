"""Texts, streamed texts and stop strings against a loop that decodes every prefix whole."""

import random

import pytest
from helpers.targets import pairs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from csd.models.text.streamed import SampleText


def byte_level() -> PreTrainedTokenizerFast:
    """Bytes, a few merges and special tokens, as GPT-2 and Qwen have them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("e", "n"), ("en", "d"), ("Ã", "©")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return finished(tokenizer, decoders.ByteLevel())


def spaced() -> PreTrainedTokenizerFast:
    """Words that begin with a space which is stripped in front of a text, as Llama 2 has them."""
    words = ["▁a", "▁end", "b", "c", "en", "d", "▁", "\n", "<0xC3>", "<0xA9>", "é"]
    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    model = models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True)
    return finished(Tokenizer(model), decoder)


def finished(tokenizer: Tokenizer, decoder) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|end|>", "<|im_start|>", "<|im_end|>")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZERS = {"byte level": byte_level(), "spaced": spaced()}
STOPS = [
    (),
    ("end",),
    ("<|im_start|>",),
    ("abc", "c"),
    ("b<|im_end|>a", "\n"),
    ("é",),
    ("en d", "d"),
]


def plain(tokenizer, tokens: list[int], stop: tuple[str, ...]) -> tuple[int, str | None, int]:
    """Number of tokens that a sample keeps, the stop string that ended it, and its place."""
    for n in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:n]).rstrip("\ufffd")
        found = [(text.find(s), len(s), s) for s in stop if s in text]
        if found:
            return n, min(found)[2], min(found)[0]
    return len(tokens), None, 0


def drawn(tokenizer, tokens, stop, split, **options) -> tuple[SampleText, int, str, str]:
    """A SampleText with tokens pushed, how many, its text, and the pieces joined."""
    text = SampleText(tokenizer, stop, streams=split is not None, **options)
    pieces, count = [], 0
    for i, token in enumerate(tokens):
        count += 1
        if text.push(token):
            break
        if split is not None and i in split:
            pieces.append(text.take())
    shown, rest = text.finish(by_token=False)
    return text, count, shown, "".join(pieces) + rest


@pairs
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("skip", [True, False], ids=["shown without", "shown with"])
@pytest.mark.parametrize("include", [False, True], ids=["cut", "included"])
def test_texts_are_those_of_a_loop_over_prefixes(name, stop, skip, include):
    tokenizer = TOKENIZERS[name]
    options = dict(include_stop=include, skip_special_tokens=skip)
    rng = random.Random(1)
    likely = ["abc", "end", " end", "é", "\n", "a", "b", "c", "b<|im_end|>a", "<|im_start|>"]
    chunks = [tokenizer.encode(s, add_special_tokens=False) for s in likely]
    chunks += [[t] for t in range(0, len(tokenizer), 17)]
    ended = 0
    for _ in range(40):
        tokens = [t for chunk in rng.choices(chunks, k=rng.randint(1, 12)) for t in chunk]
        keep, string, place = plain(tokenizer, tokens, stop)
        splits = [None, set(range(40)), {i for i in range(40) if rng.random() < 0.4}]
        found = [drawn(tokenizer, tokens, stop, split, **options) for split in splits]
        for text, count, shown, pieces in found:
            assert (count, text.stop_string) == (keep, string)
            assert shown == found[0][2]
            assert pieces == shown or found[0] == (text, count, shown, pieces)
        shown, kept = found[0][2], tokens[:keep]
        if string is None:
            assert shown == tokenizer.decode(kept, skip_special_tokens=skip)
        elif not skip:
            end = place + len(string) if include else place
            assert shown == tokenizer.decode(kept)[:end]
        else:
            ended += 1
            assert tokenizer.decode(kept, skip_special_tokens=True).startswith(shown)
            assert include or not any(s in shown for s in stop)
    assert ended or not stop or not skip


def test_a_special_token_as_stop_string_cuts_what_is_shown_in_front_of_it():
    tokenizer = TOKENIZERS["byte level"]
    tokens = tokenizer.encode("ab<|im_end|>abc<|im_start|>", add_special_tokens=False)
    options = dict(include_stop=False, skip_special_tokens=True)
    for split in (None, set(range(9))):
        text, count, shown, pieces = drawn(tokenizer, tokens, ("<|im_start|>",), split, **options)
        assert (count, shown, text.stop_string) == (len(tokens), "ababc", "<|im_start|>")
        assert pieces == ("ababc" if split else shown)


def test_a_part_of_a_stop_string_is_not_streamed():
    tokenizer = TOKENIZERS["byte level"]
    tokens = tokenizer.encode("a en", add_special_tokens=False)
    text = SampleText(
        tokenizer, ("end",), include_stop=False, skip_special_tokens=True, streams=True
    )
    for token in tokens:
        assert not text.push(token)
    assert text.take() == "a "
    assert text.finish(by_token=False) == ("a en", "en")


def test_an_end_token_is_shown_where_it_is_asked_for():
    tokenizer = TOKENIZERS["byte level"]
    tokens = tokenizer.encode("ab<|im_end|>", add_special_tokens=False)
    for include, skip, want in [(0, 1, "ab"), (0, 0, "ab"), (1, 1, "ab"), (1, 0, "ab<|im_end|>")]:
        text = SampleText(
            tokenizer, (), include_stop=bool(include), skip_special_tokens=bool(skip), streams=True
        )
        pieces = ""
        for token in tokens[:-1]:
            text.push(token)
            pieces += text.take()
        text.push(tokens[-1])
        shown, rest = text.finish(by_token=True)
        assert shown == pieces + rest == want
