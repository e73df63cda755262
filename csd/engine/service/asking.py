"""Reading and checking of a request's arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from csd.engine.call import Call
from csd.engine.engine import Engine
from csd.engine.options import Options, read_options
from csd.engine.prompt_top_logprobs import PromptScores
from csd.engine.sampling import SAMPLING
from csd.engine.top_logprobs import MOST_TOP
from csd.engine.traces.history import History
from csd.schema.arguments import check_whole

# options that apply to all requests, set when the engine is made
SET_AT_START = ("speculate", "drafter", "prior", "budget", "tokenizer")
# options of a single request: sampling, the samples to draw, the prompt, and the reported values of
# tokens. logits_processor is left out: it runs inside a step, which all requests share
SERVED = SAMPLING - {"logits_processor"} | {
    "num_samples", "first_sample", "on_error", "seed", "until", "history", "truncate_prompt",
    "chat_template_kwargs", "top_logprobs", "entropy", "prompt_logprobs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a prompt and its samples, passed in place of the model's config."""

    vocab: int
    context: int


def read_call(prompt: Any, options: Mapping[str, Any], engine: Engine, limits: Limits) -> Call:
    """Read a call of one prompt. Raises TypeError or ValueError naming the argument."""
    for name in options:
        if name in SET_AT_START:
            raise ValueError(f"{name} applies to all requests: set it when the AsyncEngine is made")
        if name in Options.__annotations__ and name not in SERVED:
            raise ValueError(
                f"{name} is an argument of csd.generate that requests of an AsyncEngine do not "
                "support"
            )
    if isinstance(options.get("history"), History):
        raise ValueError("history must be a list of past samples, got a csd.History")
    # a prompt that cannot be served is refused here: `on_error` concerns samples in flight
    asked = {name: options[name] for name in ("on_error",) if name in options}
    call = Call.read(
        prompt, {**options, "on_error": "raise"}, limits,  # type: ignore[arg-type]
        engine.generation_config, engine.tokenizer,
    )  # fmt: skip
    returns = read_options(asked)["on_error"] == "return"
    call.settings = replace(call.settings, returns_errors=returns)
    if call.many:
        raise ValueError(f"prompt must be one prompt, got {len(call.requests)}")
    return call


def read_scores(count: int, limits: Limits) -> PromptScores:
    """`PromptScores` with `count` top tokens. Raises TypeError or ValueError."""
    return PromptScores(check_whole("score_prompt", count, 0, min(MOST_TOP, limits.vocab)))
