"""Small tokenizers of the kinds in use, trained on a text of their own."""

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXT = """\
The river is wide and the bridge is old. Paris is a city; is it the capital, too? It isn't far.
def area(width, height):
    if width < 0:
        return None
    return width * height
We don't know what they've said: "the train's late", or I'm early. You're right!
<think> First, add the numbers. </think> Then the answer is 42, so write 42.
naïve café, größer als 10 Euro; 東京の天気は晴れ。 Ça va? 😀
"""
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|end|>")


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


# merges that join the tags <think> and </think> with what is around them
JOINS = (
    "< /|t h|i n|in k|th ink|. </|) .</|< th|</ th|> T|>T h|>Th e|> Ċ|> a|> <|>< /|k >|think >Ċ|"
    "think >The|Ġ <|</ think|<th ink|<think >Ċ|</think >T|</think >Ċ|Ċ Ċ|o r|Ġ l|</th ink"
)


def _joining() -> Tokenizer:
    """Bytes with the merges `JOINS`; neither tag is a token."""
    vocab = {c: i for i, c in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = [tuple(pair.split(" ")) for pair in JOINS.split("|")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """Characters beyond ASCII are bytes, and the first space of a text is stripped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        special_tokens=[*SPECIAL, *byte_tokens],
        show_progress=False,
        initial_alphabet=[chr(c) for c in range(32, 127)] + ["▁", "\n"],
    )
    words = "".join(c if ord(c) < 128 else " " for c in TEXT).split(" ")
    tokenizer.train_from_iterator([f" {w}" for w in words] * 4 + ["\n    "], trainer)
    # the bytes are tokens of the vocabulary; the trainer can add them only as special tokens
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    model = models.BPE(
        tokenizer.get_vocab(), merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    plain = Tokenizer(model)
    plain.normalizer, plain.decoder = tokenizer.normalizer, tokenizer.decoder
    return plain


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT.replace("\n", " ")] * 4, trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=[*SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


_MAKE = {
    "byte level": _byte_level,
    "byte fallback": _byte_fallback,
    "metaspace": _metaspace,
    "word piece": _word_piece,
    "joining": _joining,
}
KINDS = ("byte level", "byte fallback", "metaspace", "word piece")


@cache
def tokenizer_of(kind: str, bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of `KINDS`, which begins texts with `<s>` if `bos`."""
    tokenizer = _MAKE[kind]()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if bos:
        first = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, first)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|end|>"],
        clean_up_tokenization_spaces=kind == "word piece",
    )
