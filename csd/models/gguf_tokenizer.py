"""Parts of a GGUF file's tokenizer that transformers' reader leaves out.

The reference is llama.cpp's tokenizer of the file. Each function changes the tokenizer in place.
"""

import json
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

# pre-tokenizers (`tokenizer.ggml.pre`) that take whole words of the vocabulary without merges, and
# that prepend the beginning token if the file has no flag for it
_WHOLE_WORDS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken",
}  # fmt: skip
# pre-tokenizers that split as GPT-2 does, and those that first split off each digit
_AS_GPT2 = {
    "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4",
    "trillion", "roberta-bpe", "modern-bert", "granite-docling",
}  # fmt: skip
_DIGITS = {
    "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
}  # fmt: skip
_CONTROL, _USER_DEFINED = 3, 4


def complete(tokenizer: Any, path: str) -> None:
    """Add the missing parts to `tokenizer`. Raises ValueError for an unsupported pre-tokenizer."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    short = {n: f.contents() for n, f in fields.items() if len(f.data) == 1}
    file = {n.removeprefix("tokenizer.ggml."): v for n, v in short.items()}
    if file.get("model") == "gpt2":
        _split(tokenizer, file.get("pre"))
        _restore_special(tokenizer, fields, file.get("pre") in _WHOLE_WORDS)
    elif file.get("model") == "llama":
        _put_spaces(tokenizer, file.get("add_space_prefix", True))
        for name, default in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>")):
            if f"{name}_token_id" not in file and default in tokenizer.get_vocab():
                setattr(tokenizer, f"{'unk' if name == 'unknown' else name}_token", default)
    starts = file.get("model") == "llama" or file.get("pre") in _WHOLE_WORDS
    if tokenizer.bos_token is not None:
        tokenizer.add_bos_token = file.get("add_bos_token", starts)
    tokenizer.update_post_processor()
    _name_templates(tokenizer, short)


def _split(tokenizer: Any, pre: str | None) -> None:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    # an older transformers has its splits elsewhere
    except ImportError:
        GGUF_PRE_TOKENIZER_SPLITS = {pre: ""}
    if pre in _DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
    elif pre is not None and pre not in _AS_GPT2 and pre not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre={pre!r} is not supported; pass the tokenizer= of the original "
            "model"
        )


def _restore_special(tokenizer: Any, fields: dict[str, Any], whole_words: bool) -> None:
    """Make each special token with letters beyond the byte alphabet, as DeepSeek's, one token.

    transformers respells these tokens, and then no longer matches them in a text.
    """
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = {i: text for text, i in state["model"]["vocab"].items()}
    state["model"]["ignore_merges"] = whole_words
    added = {t["id"]: t for t in state["added_tokens"] if t["id"] < len(tokens.data)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for i, kind in enumerate(kinds.contents() if kinds is not None else ()):
        if kind in (_CONTROL, _USER_DEFINED):
            vocab[i] = text = bytes(tokens.parts[tokens.data[i]]).decode()
            added[i] = {"id": i, "content": text, "special": kind == _CONTROL, **plain}
    state["model"]["vocab"] = {text: i for i, text in sorted(vocab.items())}
    state["added_tokens"] = [added[i] for i in sorted(added)]
    # it refers to special tokens by their old ids; `complete` makes it again
    state["post_processor"] = None
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


def _put_spaces(tokenizer: Any, first: bool) -> None:
    """If `first`, add a space before a text and after each special token, even before a space."""
    backend = tokenizer.backend_tokenizer
    spaces: list = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * first + spaces)
    backend.pre_tokenizer = None
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * first)


def _name_templates(tokenizer: Any, short: dict[str, Any]) -> None:
    named = {
        key.removeprefix("tokenizer.chat_template."): text
        for key, text in short.items()
        if key.startswith("tokenizer.chat_template.")
    }
    if named:
        plain = tokenizer.chat_template
        tokenizer.chat_template = named | ({} if plain is None else {"default": plain})
