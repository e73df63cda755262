"""Keys of tiny vocabularies as llama.cpp's converter writes them."""

from typing import Any

from helpers.models.gguf_files import CONTROL, NORMAL

BYTE = 6


def byte_level(*special: str, pre: str | None = None, normal: tuple = (), **more) -> dict[str, Any]:
    """A byte-level BPE vocabulary: the bytes, a few merges, then `special` and `normal` tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    merges = ["t h", "th e", "Ġ the", "1 2", "12 3", "h e", "l l", "he ll", "hell o"]
    tokens = [*bytes_to_unicode().values(), *(m.replace(" ", "") for m in merges)]
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(special) + [NORMAL] * len(normal)
    return _keys("gpt2", [*tokens, *special, *normal], kinds, more | {"pre": pre}) | {
        "tokenizer.ggml.merges": merges
    }


def sentencepiece(*special: str, normal: tuple = (), **more) -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, bytes, words, then `special` and `normal`."""
    words = ["▁", "▁the", "▁t", "th", "he", *"thelo123", "▁h", "ll", "hello", "▁hello"]
    words = list(dict.fromkeys(words))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    kinds = [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    kinds += [CONTROL] * len(special) + [NORMAL] * len(normal)
    tokens += [*special, *normal]
    scores = [-float(i) for i in range(len(tokens))]
    return _keys("llama", tokens, kinds, more) | {"tokenizer.ggml.scores": scores}


def _keys(model: str, tokens: list, kinds: list, more: dict) -> dict[str, Any]:
    """more: keys below `tokenizer.ggml`; a text in the place of an id is the token's."""
    found = {"model": model, "tokens": tokens, "token_type": kinds}
    for key, value in more.items():
        if value is not None:
            is_text = key.endswith("_id") and isinstance(value, str)
            found[key] = tokens.index(value) if is_text else value
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def size(keys: dict[str, Any]) -> int:
    return len(keys["tokenizer.ggml.tokens"])
