"""Names of the constraints that leave a sample without a token to draw."""

from collections.abc import Iterator
from typing import Any

from csd.engine.dead_schema import dead_parts
from csd.engine.grammar import GRAMMARS
from csd.engine.requests import LiveSample
from csd.engine.sampling import SamplingParams


def no_token_left(
    live: LiveSample, tokens: list[int], tokenizer: Any, vocab: int, prompt: str
) -> ValueError:
    """Returns the error of a sample that has no token to draw after `tokens`.

    prompt: name of the prompt in the message.
    """
    request = live.request
    names = _names(request.params, request.prompt, tokens, vocab)
    remedy = ""
    if names == ["json_schema"]:
        parts = dead_parts(request.params, tokenizer, vocab, tokens)
        if parts:
            names = [f"json_schema at {' and '.join(parts)}"]
            remedy = f": no text fits the schema from here on; remove {parts[-1]} or change it"
    return ValueError(
        f"{' and '.join(names)} banned all tokens after {len(tokens)} tokens of sample "
        f"{live.index} of {prompt}{remedy}"
    )


def _names(params: SamplingParams, prompt: list[int], tokens: list[int], vocab: int) -> list[str]:
    """Names of the constraints that together ban all tokens, in the order of `_bans`."""
    left, names = set(range(vocab)), []
    for name, banned in _bans(params, prompt, tokens, vocab):
        if left & banned:
            left -= banned
            names.append(name)
        if not left:
            return names
    # the other bans depend on the logits or on the state of a grammar
    others = [name for name in ("logits_processor", *GRAMMARS) if getattr(params, name)]
    return [*names, *(others or ["the model's own -inf"])]


def _bans(
    params: SamplingParams, prompt: list[int], tokens: list[int], vocab: int
) -> Iterator[tuple[str, set[int]]]:
    """Yield each constraint's name and the tokens it bans after a prompt and sample tokens."""
    before = prompt + tokens
    yield "logit_bias", {token for token, bias in params.logit_bias if bias == float("-inf")}
    yield "bad_words", {
        word[-1] for word in params.bad_words
        if len(word) == 1 or before[1 - len(word) :] == [*word[:-1]]
    }  # fmt: skip
    if params.allowed_token_ids is not None:
        yield "allowed_token_ids", set(range(vocab)) - {*params.allowed_token_ids}
    yield "suppress_tokens", {*params.suppress_tokens}
    if len(tokens) < params.min_new_tokens:
        yield "min_new_tokens", {*params.end_ids}
    n = params.no_repeat_ngram_size
    if n:
        last = before[len(before) - n + 1 :]
        starts = range(len(before) - n + 1)
        yield (
            "no_repeat_ngram_size",
            {before[i + n - 1] for i in starts if before[i : i + n - 1] == last},
        )
