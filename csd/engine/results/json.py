"""`csd sample --json`: the result of a call, with the texts of its token ids."""

from dataclasses import asdict
from typing import Any

from csd.engine.results.result import Samples
from csd.models.text.token_bytes import token_bytes


def to_json(out: Samples, tokenizer: Any, model: str, drafts: bool) -> dict:
    """The object that `csd sample --json` prints: `out`, and the text of every token id in it.

    drafts: also include each sample's list of `Draft`.
    """
    result = out.to_dict() | {"model": model}
    ids = {*out.prompt_ids, *(t for tokens in out.tokens for t in tokens)}
    if drafts:
        result["drafts"] = [[asdict(d) for d in s.drafts] for s in out]
        ids.update(t for s in out for d in s.drafts for t in d.tokens)
    if tokenizer is not None:
        texts = result["pieces"] = pieces(tokenizer, sorted(ids))
        result["prompt"] = tokenizer.decode(out.prompt_ids)
        result["characters"] = [characters(tokenizer, tokens, texts) for tokens in out.tokens]
    return result


def pieces(tokenizer: Any, ids: list[int]) -> dict[int, str]:
    """Text of each token id inside a longer text; U+FFFD for a part of a character."""
    of = token_bytes(tokenizer)
    return {i: of.text(i) for i in ids}


def characters(tokenizer: Any, tokens: list[int], pieces: dict[int, str]) -> dict[int, str]:
    """Texts, by position, of tokens that are parts of a character: the last part gets all of it."""
    texts: dict[int, str] = {}
    held: list[int] = []
    for i, token in enumerate(tokens):
        held = [*held, i] if "\ufffd" in pieces[token] else []
        text = tokenizer.decode([tokens[j] for j in held]) if held else "\ufffd"
        if "\ufffd" not in text:
            texts |= dict.fromkeys(held, "") | {i: text}
            held = []
    return texts
