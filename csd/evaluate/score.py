"""`csd.score`: log-probabilities of the caller's completions."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from csd.engine.call import RunSettings
from csd.engine.generate import engine_for
from csd.engine.options import read_options
from csd.engine.options.params import limited, resolve
from csd.engine.requests.request import Request
from csd.engine.results.logprobs import Measures, PromptScores
from csd.engine.results.result import Samples
from csd.models.text.context import encode_behind
from csd.models.text.prompts import parse
from csd.state.filters import FILTERS
from csd.utils.check import shown
from csd.utils.other_names import unknown_argument
from csd.verify.teacher_forcing import TeacherForcing

# arguments of `generate` that apply to scoring
TAKEN = (
    *FILTERS,
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "suppress_tokens",
    "no_repeat_ngram_size",
    "frequency_penalty",
    "presence_penalty",
    "logits_processor",
    "tokenizer",
    "attention_mask",
    "chat_template_kwargs",
    "top_logprobs",
    "entropy",
    "prompt_logprobs",
)


def score(
    model: Any,
    prompt: Any,
    completions: Sequence[Any],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    **options: Any,
) -> Samples | list[Samples]:
    """Log-probabilities of completions, whose tokens are input instead of drawn.

    model, prompt: as in `csd.generate`. The prompt is read once for all of its completions.
    completions: a list of texts or token ids, or an array of ids with one row per completion; for
        a list of prompts, a list of these. A text is tokenized behind its prompt; a tokenizer that
        joins it with the prompt's end is an error.
    options: filters and constraints of `csd.generate`, each off by default, whatever the model's
        generation config has; `top_logprobs`, `entropy`, `prompt_logprobs`, `tokenizer`,
        `attention_mask` and `chat_template_kwargs`.

    Returns `Samples` (a list of them for a list of prompts), one `Sample` per completion. Its
    `raw_logprobs` are each token's log-probabilities by the model itself; its `logprobs` are by
    the distribution that sampling with these filters and constraints draws from. With an exact
    engine, both have the same bits as when the engine samples these tokens.

    Raises ValueError or TypeError for arguments that cannot be served, naming the argument.
    """
    asked = _read(options)
    engine = engine_for(model, device=device, dtype=dtype, revision=revision)
    config = engine.config
    tokenizer = asked["tokenizer"] or engine.tokenizer
    prompts, many = parse(
        prompt,
        tokenizer,
        config.vocab,
        asked["attention_mask"],
        asked["chat_template_kwargs"],
        config.context,
    )
    rows = _completions(completions, prompts, many, tokenizer, config.vocab)
    given_params = resolve(None, asked, vocab=config.vocab, tokenizer=tokenizer)
    requests: list[Request] = []
    given: dict[tuple[int, int], list[int]] = {}
    for i, (ids, tokens) in enumerate(zip(prompts, rows, strict=True)):
        name = f"prompt {i}" if many else "the prompt"
        params = given_params.replace(max_new_tokens=max(map(len, tokens)))
        params = limited(params, config.context, len(ids), name)
        # the index is the seed, so equal prompts get different keys
        request = Request.of(i, ids, params, range(len(tokens)), i)
        request.scores = PromptScores() if asked["prompt_logprobs"] else None
        requests.append(request)
        given |= {(request.key, j): row for j, row in enumerate(tokens)}
    settings = RunSettings(
        budget=0,
        speculate=False,
        tokenizer=tokenizer,
        forcing=lambda ops, rows: TeacherForcing(given, ops, rows),
        measures=Measures(asked["top_logprobs"], asked["entropy"]),
    )
    for _ in engine.run(requests, settings):
        pass
    results = [request.result() for request in requests]
    return results if many else results[0]


def _read(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in TAKEN:
            raise unknown_argument(name, TAKEN)
    given = {name: value for name, value in options.items() if value is not None}
    return read_options(FILTERS | given | dict(ignore_eos=True))


def _completions(
    completions: Any, prompts: list[list[int]], many: bool, tokenizer: Any, vocab: int
) -> list[list[list[int]]]:
    """Token ids of every completion of every prompt. Raises ValueError for anything else."""
    listed = _plain(completions)
    listed = listed if many else [listed]
    expected = "a list of texts or token ids" + (" for each prompt" if many else "")
    if isinstance(listed, str) or not isinstance(listed, Sequence) or len(listed) != len(prompts):
        raise ValueError(
            f"completions must be {expected}, {len(prompts)} in all, got {shown(listed)}"
        )
    found = []
    for prompt, own in zip(prompts, map(_plain, listed), strict=True):
        if isinstance(own, str) or not isinstance(own, Sequence) or not len(own):
            raise ValueError(f"completions must be {expected}, got {shown(own)}")
        found.append([_ids(one, prompt, tokenizer, vocab) for one in own])
    return found


def _ids(completion: Any, prompt: list[int], tokenizer: Any, vocab: int) -> list[int]:
    if isinstance(completion, str):
        if tokenizer is None:
            raise ValueError("completions that are strings need a tokenizer: pass tokenizer=")
        text = completion
        completion, joined = encode_behind(tokenizer, prompt, text)
        if joined:
            raise ValueError(
                "completions must be texts that the tokenizer separates from the prompt, but it "
                f"joins the prompt's end {joined!r} with {shown(text)}: move {joined!r} from the "
                "prompt to the beginning of each completion, or pass token ids"
            )
    completion = _plain(completion)
    whole = isinstance(completion, list | tuple) and all(
        isinstance(t, Integral) and not isinstance(t, bool) for t in completion
    )
    if not whole or not completion:
        raise ValueError(
            f"completions must be lists of at least one token id, got {shown(completion)}"
        )
    if not 0 <= min(completion) <= max(completion) < vocab:
        raise ValueError(
            f"completions must lie in the vocabulary of {vocab}, got {shown(completion)}"
        )
    return [*map(int, completion)]


def _plain(value: Any) -> Any:
    """A numpy array or torch tensor as lists; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value
