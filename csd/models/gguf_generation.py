"""Generation config of a GGUF file: end tokens, and the sampling that its maker recommends.

llama.cpp ends a sample at the file's own end tokens and at tokens whose texts are known to end a
turn, whatever type the file gives these tokens.
"""

from collections.abc import Iterator
from typing import Any

_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
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

    keys: values by name; tokens: the reader's field of the vocabulary, or None.

    Raises ValueError, naming the key, for a recommended sampling option that csd does not have.
    """
    from transformers import GenerationConfig

    size = len(tokens.data) if tokens is not None else None
    ids = {
        name: value for name in (*_IDS, *_FILL_IN) if (value := _id(keys, name, size)) is not None
    }
    return GenerationConfig(
        bos_token_id=ids.get("bos_token_id"),
        eos_token_id=sorted(_ends(keys, ids, tokens)) or None,
        pad_token_id=ids.get("padding_token_id"),
        suppress_tokens=keys.get("tokenizer.ggml.suppress_tokens"),
        **_sampling(keys),
    )


def _id(keys: dict[str, Any], name: str, size: int | None) -> int | None:
    """Token id under a key; None if it is missing or outside the vocabulary, as in llama.cpp."""
    value = keys.get(f"tokenizer.ggml.{name}")
    is_token = value is not None and value >= 0 and (size is None or value < size)
    return value if is_token else None


def _ends(keys: dict[str, Any], ids: dict[str, int], tokens: Any) -> set[int]:
    ends = {id for name, id in ids.items() if name not in ("bos_token_id", "padding_token_id")}
    if tokens is None:
        return ends
    if "eos_token_id" not in ids and keys.get("tokenizer.ggml.model") == "llama":
        # SentencePiece's end token, which the oldest files leave out
        ends.add(2)
    looked_for = _ENDS.union(*(texts for key, texts in _FILL_IN.items() if key not in ids))
    known = {text.encode() for text in looked_for}
    found = {i: text.decode() for i, text in _texts(tokens) if text in known}
    return (ends | found.keys()) - set(_turns_within(found))


def _texts(tokens: Any) -> Iterator[tuple[int, bytes]]:
    for i, place in enumerate(tokens.data):
        yield i, bytes(tokens.parts[place])


def _turns_within(found: dict[int, str]) -> Iterator[int]:
    """Ids of tokens that end only a part of a turn, if the vocabulary also has turn ends."""
    texts = set(found.values())
    calls = "<|call|>" in texts or "<|calls|>" in texts
    parts = {
        "<|end|>": calls and ("<|return|>" in texts or "<|flush|>" in texts),
        "</s>": "<|tool_response>" in texts,
    }
    for i, text in found.items():
        if parts.get(text):
            yield i


def _sampling(keys: dict[str, Any]) -> dict[str, Any]:
    found = {
        key.removeprefix("general.sampling."): value
        for key, value in keys.items()
        if key.startswith("general.sampling.")
    }
    if found.get("penalty_repeat", 1) == 1:
        found.pop("penalty_last_n", None)
    for name, value in found.items():
        off = _OTHER_SAMPLING.get(name, ())
        if name not in _SAMPLING and value not in off and ... not in off:
            raise ValueError(f"csd does not implement its general.sampling.{name}={value!r}")
    options = {_SAMPLING[name]: value for name, value in found.items() if name in _SAMPLING}
    for name in ("temperature", "top_k"):
        # below 0, a temperature is greedy and top_k is off
        options |= {name: max(0, options[name])} if name in options else {}
    return {"do_sample": True, **options} if options else {}
