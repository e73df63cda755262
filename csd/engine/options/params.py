"""Sampling parameters of one prompt: how its samples are drawn and when they end."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from csd.engine.options.grammar import check_schema, check_text
from csd.engine.options.logit_params import (
    LONGEST,
    OFF,
    check_allowed,
    check_bias,
    check_functions,
    check_id_list,
    check_tags,
    check_words,
    row_params,
)
from csd.state.slots import MAX_STOP_IDS
from csd.utils.arguments import (
    LARGEST,
    STEEPEST,
    check_flag,
    check_ids,
    check_number,
    check_strings,
    check_temperature,
    check_whole,
)

LOG = logging.getLogger("csd")

OF_CONFIG = " of the model's generation config"

# options of transformers' generation config that csd does not implement -> values that mean off
_UNSUPPORTED: dict[str, tuple] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "guidance_scale": (None, 1),
    "sequence_bias": (None,),
    "diversity_penalty": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "remove_invalid_values": (None, False),
    "exponential_decay_length_penalty": (None,),
    "begin_suppress_tokens": (None, []),
    "top_h": (None,),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "renormalize_logits": (None, False),
    "watermarking_config": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "dola_layers": (None,),
}


def _number(default: float, low: float, high: float = math.inf, above: bool = False) -> Any:
    return _checked(default, lambda name, value: check_number(name, value, low, high, above))


def _whole(default: int, low: int, high: int | None = None) -> Any:
    return _checked(default, lambda name, value: check_whole(name, value, low, high))


def _temperature(name: str, value: Any) -> float:
    is_greedy = check_number(name, value, 0, STEEPEST) == 0
    return check_number(name, value, 0) if is_greedy else check_temperature(value, name)


def _most_thought(name: str, value: Any) -> int | None:
    return None if value is None else check_whole(name, value, 0, LARGEST)


def _checked(default: Any, check: Callable[[str, Any], Any]) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one prompt's samples.

    Logits are changed first, then filtered as in transformers: temperature, top-k to min-p.
    """

    temperature: float = _checked(1.0, _temperature)  # 0 is greedy
    top_k: int = _whole(0, 0)  # 0 is off
    top_p: float = _number(1.0, 0, 1, above=True)
    min_p: float = _number(0.0, 0, 1)
    repetition_penalty: float = _number(1.0, 1 / STEEPEST, STEEPEST)
    max_new_tokens: int = _whole(512, 1, LARGEST)
    min_new_tokens: int = _whole(0, 0, LARGEST)
    end_ids: tuple[int, ...] = ()  # the model's end tokens and `stop_token_ids`
    ignore_eos: bool = _checked(False, check_flag)
    stop: tuple[str, ...] = _checked((), check_strings)  # found in the text with special tokens
    include_stop: bool = _checked(False, check_flag)  # texts include the stop string or end token
    skip_special_tokens: bool = _checked(True, check_flag)  # in texts
    # changes of logits before the filters, in this order; `logit_params` lists the values for off
    logit_bias: tuple[tuple[int, float], ...] = _checked((), check_bias)  # by token id
    bad_words: tuple[tuple[int, ...], ...] = _checked((), check_words)  # as token ids
    allowed_token_ids: tuple[int, ...] | None = _checked(None, check_allowed)
    suppress_tokens: tuple[int, ...] = _checked((), check_id_list)
    no_repeat_ngram_size: int = _whole(0, 0, LONGEST)  # 0 is off
    frequency_penalty: float = _number(0.0, -STEEPEST, STEEPEST)
    presence_penalty: float = _number(0.0, -STEEPEST, STEEPEST)
    logits_processor: tuple[Callable, ...] = _checked((), check_functions)
    max_thinking_tokens: int | None = _checked(None, _most_thought)  # None is off
    # token ids of the begin tag, the end tag and the text written to end a thought
    thinking_tags: tuple[tuple[int, ...], ...] | None = _checked(None, check_tags)
    json_schema: str | None = _checked(None, check_schema)
    regex: str | None = _checked(None, check_text)
    grammar: str | None = _checked(None, check_text)  # in Lark syntax

    def __post_init__(self) -> None:
        for name in _CHECKS:
            object.__setattr__(self, name, check_option(name, getattr(self, name)))
        # LARGEST exceeds every vocabulary
        object.__setattr__(self, "top_k", min(self.top_k, LARGEST))
        if len(self.end_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids and the model's end tokens must be at most {MAX_STOP_IDS}, got "
                f"{len(self.end_ids)}"
            )

    @property
    def stopping_ids(self) -> tuple[int, ...]:
        return () if self.ignore_eos else self.end_ids


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    f.name: f.metadata["check"] for f in fields(SamplingParams) if "check" in f.metadata
}


def check_option(name: str, value: Any, where: str = "") -> Any:
    """Checked value of a field. Raises TypeError or ValueError if it cannot be served.

    where: text after the name in an error message.
    """
    return _CHECKS[name](name + where, value)


# fields for drawing a token, which a model's generation config may set
FILTERS = tuple(f.name for f in fields(SamplingParams))[:5]
# the arguments of `resolve`
SAMPLING = frozenset(
    {
        *FILTERS,
        "max_new_tokens",
        "min_new_tokens",
        "stop",
        "stop_token_ids",
        "end_token_ids",
        "ignore_eos",
        "include_stop",
        "skip_special_tokens",
        *OFF,
    }
)


def asks_for(generation_config: Any) -> tuple[str, object] | None:
    """First option set in a generation config that csd does not implement, and its value."""
    for name, off in _UNSUPPORTED.items():
        value = getattr(generation_config, name, None)
        if not any(value == o and type(value) in (type(o), int, float) for o in off):
            return name, value
    return None


def resolve(
    generation_config: Any,
    *,
    context: int,
    prompt_tokens: int,
    vocab: int,
    tokenizer: Any = None,
    name: str = "prompt",
    **given: Any,
) -> SamplingParams:
    """SamplingParams of a prompt: arguments first, then the model's generation config, then off.

    `given` holds the arguments of `csd.generate`; None means not given. `do_sample` of the
    generation config is ignored. `max_new_tokens` defaults to 512, or less if the context has less
    room; a given value that does not fit is an error. name: of the prompt, in error messages.
    tokenizer: its end token ends samples too, in addition to those of the generation config.
    """
    config = generation_config
    asked = asks_for(config)
    if asked is not None:
        option, value = asked
        raise ValueError(
            f"the model's generation config sets {option}={value!r}, which csd does not "
            f"implement; set model.generation_config.{option} = None (or remove it from "
            "generation_config.json) to sample without it"
        )
    params = {}
    for option in FILTERS:
        value = given.get(option)
        if value is None and (value := getattr(config, option, None)) is not None:
            value = check_option(option, value, OF_CONFIG)
        if value is not None:
            params[option] = value

    if given.get("end_token_ids") is None:
        ends, more = config_ends(config, vocab), tokenizer_ends(tokenizer, vocab)
        if set(more) - set(ends) and not given.get("ignore_eos"):
            _log_ends(tuple(ends), tuple(more))
        ends = list(dict.fromkeys([*ends, *more]))
    else:
        ends = check_ids("end_token_ids", given["end_token_ids"], MAX_STOP_IDS, vocab)
    if given.get("ignore_eos"):
        ends = []
    stop_ids = check_ids("stop_token_ids", given.get("stop_token_ids"), MAX_STOP_IDS, vocab)
    stop = check_strings("stop", given.get("stop"))
    if given.get("stop") is None:
        stop = check_strings("stop_strings" + OF_CONFIG, getattr(config, "stop_strings", None))

    room = context - prompt_tokens
    longest = given.get("max_new_tokens")
    if longest is None:
        longest = min(512, room)
        if longest < 1:
            raise ValueError(
                f"{name} has {prompt_tokens} tokens, which leaves no room in the model's context "
                f"of {context}: shorten it, or pass truncate_prompt"
            )
    else:
        longest = check_option("max_new_tokens", longest)
        if not prompt_tokens and longest > context:
            # for any prompt
            raise ValueError(f"max_new_tokens={longest} exceeds the model's context of {context}")
        if longest > room:
            raise ValueError(
                f"{name} has {prompt_tokens} tokens, which with max_new_tokens={longest} exceed "
                f"the model's context of {context}"
            )
    least = given.get("min_new_tokens")
    least = 0 if least is None else check_option("min_new_tokens", least)
    if least > longest:
        # a default max_new_tokens depends on the prompt, so the message names that
        of = f" of {name}" if given.get("max_new_tokens") is None else ""
        raise ValueError(
            f"min_new_tokens must be at most max_new_tokens={longest}{of}, got {least}"
        )
    texts = {
        option: given[option]
        for option in ("include_stop", "skip_special_tokens")
        if given.get(option) is not None
    }
    return SamplingParams(
        **params,
        **texts,
        **row_params(given, config, tokenizer, vocab),
        max_new_tokens=longest,
        min_new_tokens=least,
        end_ids=tuple(dict.fromkeys([*ends, *stop_ids])),
        stop=stop,
    )


@cache
def _log_ends(config: tuple[int, ...], tokenizer: tuple[int, ...]) -> None:
    """Log once that a model's two lists of end tokens differ."""
    LOG.warning(
        "the generation config has the end tokens %s and the tokenizer has %s: samples end at any "
        "of them; end_token_ids= replaces both lists",
        list(config),
        list(tokenizer),
    )


def config_ends(generation_config: Any, vocab: int) -> list[int]:
    """End tokens of a generation config that lie in the model's vocabulary."""
    ends = getattr(generation_config, "eos_token_id", None)
    return [i for i in check_ids("eos_token_id" + OF_CONFIG, ends, MAX_STOP_IDS) if i < vocab]


def tokenizer_ends(tokenizer: Any, vocab: int) -> list[int]:
    """End token of a tokenizer if in the vocabulary, else empty; a chat model's ends a turn."""
    end = getattr(tokenizer, "eos_token_id", None)
    return [end] if isinstance(end, int) and 0 <= end < vocab else []
