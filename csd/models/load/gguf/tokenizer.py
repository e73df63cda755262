"""Tokenizer and generation config of a GGUF file, as llama.cpp reads them.

`complete` adds the parts of the tokenizer that transformers' reader leaves out; it and the
functions that it calls change the tokenizer in place. The reference is llama.cpp's tokenizer of the
file.

`generation_config` has the end tokens, and the sampling that the file's maker recommends; values of
a `generation_config.json` in the file's folder replace them (`with_beside`). llama.cpp ends a
sample at the file's own end tokens and at tokens whose texts are known to end a turn, whatever type
the file gives these tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers

from csd.models.load.gguf.header import ByteTexts, below, header_of

# pre-tokenizers (`tokenizer.ggml.pre`) that take whole words of the vocabulary without merges, and
# that prepend the beginning token if the file has no flag for it
_WHOLE_WORDS = {
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
}
# pre-tokenizers that split as GPT-2 does, and those that first split off each digit
_AS_GPT2 = {
    "default",
    "gpt-2",
    "phi-2",
    "mpt",
    "olmo",
    "jais",
    "gigachat",
    "a.x-4.0",
    "mellum",
    "exaone4",
    "trillion",
    "roberta-bpe",
    "modern-bert",
    "granite-docling",
}
_DIGITS = {
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
}
_CONTROL, _USER_DEFINED = 3, 4


def complete(tokenizer: Any, path: str) -> None:
    """Add the missing parts to `tokenizer`. Raises ValueError for an unsupported pre-tokenizer."""
    keys = header_of(path).keys
    short = {n: value for n, value in keys.items() if not isinstance(value, list | ByteTexts)}
    file = below(short, "tokenizer.ggml.")
    if file.get("model") == "gpt2":
        _split(tokenizer, file.get("pre"))
        _restore_special(tokenizer, keys, file.get("pre") in _WHOLE_WORDS)
    elif file.get("model") == "llama":
        _put_spaces(tokenizer, file.get("add_space_prefix", True))
        for name, default in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>")):
            if f"{name}_token_id" not in file and default in tokenizer.get_vocab():
                setattr(tokenizer, f"{'unk' if name == 'unknown' else name}_token", default)
    starts = file.get("model") == "llama" or file.get("pre") in _WHOLE_WORDS
    if tokenizer.bos_token is not None:
        tokenizer.add_bos_token = file.get("add_bos_token", starts)
    tokenizer.update_post_processor()
    if named := below(short, "tokenizer.chat_template."):
        plain = tokenizer.chat_template
        tokenizer.chat_template = named | ({} if plain is None else {"default": plain})


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


def _restore_special(tokenizer: Any, keys: dict[str, Any], whole_words: bool) -> None:
    """Make each special token with letters beyond the byte alphabet, as DeepSeek's, one token.

    transformers respells these tokens, and then no longer matches them in a text.
    """
    tokens, backend = keys["tokenizer.ggml.tokens"], tokenizer.backend_tokenizer
    special = {
        i: AddedToken(tokens[i].decode(), special=kind == _CONTROL, normalized=False)
        for i, kind in enumerate(keys.get("tokenizer.ggml.token_type") or ())
        if kind in (_CONTROL, _USER_DEFINED)
    }
    have = backend.get_added_tokens_decoder()
    # a vocabulary as text and back takes a second
    if have == special and bool(backend.model.ignore_merges) == whole_words:
        return
    state = json.loads(backend.to_str())
    vocab = {i: text for text, i in state["model"]["vocab"].items()}
    state["model"]["ignore_merges"] = whole_words
    added = {t["id"]: t for t in state["added_tokens"] if t["id"] < len(tokens)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for i, token in special.items():
        vocab[i] = token.content
        added[i] = {"id": i, "content": token.content, "special": token.special, **plain}
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


_ENDS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
}
_IDS = tuple(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding"))
# key of a token -> texts that are searched for if the key is missing
_FILL_IN = {
    "fim_pad_token_id": {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    "fim_rep_token_id": {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    "fim_sep_token_id": {"<|file_sep|>"},
}
# `general.sampling.*` -> the option of transformers
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# recommended sampling options that csd does not have -> the values that turn them off
_OTHER_SAMPLING: dict[str, tuple] = {
    "mirostat": (0,),
    "xtc_probability": (0,),
    # parameters of the two above
    "mirostat_tau": (...,),
    "mirostat_eta": (...,),
    "xtc_threshold": (...,),
    # number of last tokens that a repetition penalty counts: csd counts all
    "penalty_last_n": (-1,),
}


def generation_config(keys: dict[str, Any], tokens: Any) -> Any:
    """The `transformers` generation config of a GGUF file.

    keys: values by name; tokens: the vocabulary's texts, or None.

    Raises ValueError, naming the key, for a recommended sampling option that csd does not have.
    """
    from transformers import GenerationConfig

    size = len(tokens) if tokens is not None else math.inf
    ids = {name: keys.get(f"tokenizer.ggml.{name}") for name in (*_IDS, *_FILL_IN)}
    # an id outside of the vocabulary counts as missing, as in llama.cpp
    ids = {name: id for name, id in ids.items() if id is not None and 0 <= id < size}
    return GenerationConfig(
        bos_token_id=ids.get("bos_token_id"),
        eos_token_id=sorted(_ends(keys, ids, tokens)) or None,
        pad_token_id=ids.get("padding_token_id"),
        suppress_tokens=keys.get("tokenizer.ggml.suppress_tokens"),
        **_sampling(keys),
    )


# file of transformers with a model's generation config
BESIDE = "generation_config.json"


def with_beside(own: Any, path: Path) -> Any:
    """A generation config with the values of the JSON file at `path`, or `own` if there is none.

    Raises ValueError, naming the file, if it is no generation config.
    """
    if not path.exists():
        return own
    if not path.is_file():
        # reading a pipe would wait for a writer
        raise ValueError(f"{path} must be a regular file")
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must have a JSON object, got {type(values).__name__}")
    return type(own).from_dict(own.to_dict() | values)


def _ends(keys: dict[str, Any], ids: dict[str, Any], tokens: Any) -> set[int]:
    ends = {id for name, id in ids.items() if name not in ("bos_token_id", "padding_token_id")}
    if tokens is None:
        return ends
    if "eos_token_id" not in ids and keys.get("tokenizer.ggml.model") == "llama":
        # SentencePiece's end token, which the oldest files leave out
        ends.add(2)
    looked_for = _ENDS.union(*(texts for key, texts in _FILL_IN.items() if key not in ids))
    known = {text.encode() for text in looked_for}
    known_ends = {i: text.decode() for i, text in enumerate(tokens) if text in known}
    texts = {*known_ends.values()}
    calls = "<|call|>" in texts or "<|calls|>" in texts
    # texts that end only a part of a turn, if the vocabulary also has turn ends
    parts = {
        "<|end|>": calls and ("<|return|>" in texts or "<|flush|>" in texts),
        "</s>": "<|tool_response>" in texts,
    }
    return (ends | known_ends.keys()) - {i for i, text in known_ends.items() if parts.get(text)}


def _sampling(keys: dict[str, Any]) -> dict[str, Any]:
    values = below(keys, "general.sampling.")
    if values.get("penalty_repeat", 1) == 1:
        values.pop("penalty_last_n", None)
    for name, value in values.items():
        off = _OTHER_SAMPLING.get(name, ())
        if name not in _SAMPLING and value not in off and ... not in off:
            raise ValueError(f"csd does not implement its general.sampling.{name}={value!r}")
    # below 0, a temperature is greedy and top_k is off
    options = {
        _SAMPLING[name]: max(0, value) if name in ("temp", "top_k") else value
        for name, value in values.items()
        if name in _SAMPLING
    }
    return {"do_sample": True, **options} if options else {}
