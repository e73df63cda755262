"""`csd.score`: log-probabilities of the caller's completions."""

from collections.abc import Sequence
from typing import Any

import torch

from csd.engine.call import RunSettings
from csd.engine.generate import engine_for
from csd.engine.options import read_without_config
from csd.engine.options.params import ENDS, TOKEN_RULES, limited, resolve_for_given
from csd.engine.requests.request import Request
from csd.engine.results.logprobs import Measures, PromptScores
from csd.engine.results.result import Samples
from csd.graph.teacher_forcing import TeacherForcing
from csd.models.text.context import read_completions
from csd.models.text.prompts import parse
from csd.state.filters import FILTERS

# arguments of `generate` that apply to scoring
TAKEN = (
    *FILTERS,
    *TOKEN_RULES,
    "min_new_tokens",
    *ENDS,
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
    quantization: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> Samples | list[Samples]:
    """Log-probabilities of completions, whose tokens are input instead of drawn.

    model, prompt: as in `csd.generate`. The prompt is read once for all of its completions.
    completions: a list of texts or token ids, or an array of ids with one row per completion; for
        a list of prompts, a list of these. A text is tokenized behind its prompt; a tokenizer that
        joins it with the prompt's end is an error.
    options: filters and constraints of `csd.generate`, each off by default, whatever the model's
        generation config has; `min_new_tokens` with the arguments for end tokens, which are by
        default those of sampling, and which end no completion; `logits_processor`, `top_logprobs`,
        `entropy`, `prompt_logprobs`, `tokenizer`, `attention_mask` and `chat_template_kwargs`.

    Returns `Samples` (a list of them for a list of prompts), one `Sample` per completion. Its
    `raw_logprobs` are each token's log-probabilities by the model itself; its `logprobs` are by
    the distribution that sampling with these filters and constraints draws from. With an exact
    engine, both have the same bits as when the engine samples these tokens.

    Raises ValueError or TypeError for arguments that cannot be served, naming the argument.
    """
    asked = read_without_config(options, TAKEN)
    engine = engine_for(
        model, device=device, dtype=dtype, quantization=quantization, revision=revision
    )
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
    rows = read_completions(completions, prompts, many, tokenizer, config.vocab)
    requests: list[Request] = []
    completions_of: dict[tuple[int, int], list[int]] = {}
    for i, (ids, tokens) in enumerate(zip(prompts, rows, strict=True)):
        name = f"prompt {i}" if many else "the prompt"
        params = resolve_for_given(
            engine.generation_config,
            asked,
            max(map(len, tokens)),
            vocab=config.vocab,
            tokenizer=tokenizer,
        )
        params = limited(params, config.context, len(ids), name)
        # the index is the seed, so equal prompts get different keys
        request = Request.of(i, ids, params, range(len(tokens)), i)
        request.progress.scores = PromptScores() if asked["prompt_logprobs"] else None
        requests.append(request)
        completions_of |= {(request.key, j): row for j, row in enumerate(tokens)}
    settings = RunSettings(
        budget=0,
        speculate=False,
        tokenizer=tokenizer,
        forcing=lambda ops, rows: TeacherForcing(completions_of, ops, rows),
        measures=Measures(asked["top_logprobs"], asked["entropy"]),
    )
    for _ in engine.run(requests, settings):
        pass
    results = [request.result() for request in requests]
    return results if many else results[0]
