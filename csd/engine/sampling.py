"""How the samples of one prompt are drawn and when they end."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from csd.schema.arguments import check_number, check_whole
from csd.state.slots import MAX_STOP_IDS

LOG = logging.getLogger("csd")

# of transformers' generation config: option -> the values that mean it is off
_UNSUPPORTED: dict[str, tuple] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "guidance_scale": (None, 1),
    "sequence_bias": (None,),
    "diversity_penalty": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "min_length": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "remove_invalid_values": (None, False),
    "exponential_decay_length_penalty": (None,),
    "suppress_tokens": (None, []),
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


def _whole(default: int, low: int) -> Any:
    return _checked(default, lambda name, value: check_whole(name, value, low))


def _checked(default: Any, check: Callable[[str, Any], Any]) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Filters apply in transformers' order: penalty, temperature, top-k, top-p, min-p."""

    temperature: float = _number(1.0, 0)  # 0 is greedy
    top_k: int = _whole(0, 0)  # 0 is off
    top_p: float = _number(1.0, 0, 1, above=True)
    min_p: float = _number(0.0, 0, 1)
    repetition_penalty: float = _number(1.0, 0, above=True)
    max_new_tokens: int = _whole(512, 1)
    min_new_tokens: int = _whole(0, 0)
    end_ids: tuple[int, ...] = ()  # the model's end tokens and `stop_token_ids`
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # found in the text with special tokens
    include_stop: bool = False  # texts end behind a stop string or end token, not before it
    skip_special_tokens: bool = True  # in texts

    def __post_init__(self) -> None:
        for f in fields(self):
            if "check" in f.metadata:
                f.metadata["check"](f.name, getattr(self, f.name))
        for name in ("include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop must be non-empty strings, got {list(self.stop)!r}")
        if len(self.end_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"at most {MAX_STOP_IDS} end tokens are supported, got {len(self.end_ids)}"
            )

    @property
    def stopping_ids(self) -> tuple[int, ...]:
        return () if self.ignore_eos else self.end_ids


# how a token is drawn: the fields that a model's generation config may set
FILTERS = tuple(f.name for f in fields(SamplingParams))[:5]
# the arguments of `resolve`
SAMPLING = frozenset(
    {*FILTERS, "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "end_token_ids",
     "ignore_eos", "include_stop", "skip_special_tokens"}
)  # fmt: skip


def asks_for(generation_config: Any) -> tuple[str, object] | None:
    """The first option of a generation config that csd does not implement, with its value."""
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
    """SamplingParams of a prompt: what was given, then the model's generation config, then off.

    `given` holds the arguments of `csd.generate`; None means not given. `do_sample` of the
    generation config is ignored. `max_new_tokens` is 512, cut to what the context still holds; a
    given one that does not fit is an error, in which `name` is the prompt's.
    tokenizer: its end token ends samples too, beside those of the generation config.
    """
    config = generation_config
    asked = asks_for(config)
    if asked is not None:
        option, value = asked
        raise ValueError(
            f"the model's generation config asks for {option}={value!r}, which csd does not "
            f"implement; set model.generation_config.{option} = None (or remove it from "
            "generation_config.json) to sample without it"
        )
    params = {}
    for option in FILTERS:
        value = given.get(option)
        value = getattr(config, option, None) if value is None else value
        if value is not None:
            params[option] = value

    if given.get("end_token_ids") is None:
        ends, more = config_ends(config), tokenizer_ends(tokenizer, vocab)
        if set(more) - set(ends) and not given.get("ignore_eos"):
            _log_ends(tuple(ends), tuple(more))
        ends = list(dict.fromkeys([*ends, *more]))
    else:
        ends = _ids("end_token_ids", given["end_token_ids"], vocab)
    if given.get("ignore_eos"):
        ends = []
    stop_ids = _ids("stop_token_ids", given.get("stop_token_ids"), vocab)
    stop = given.get("stop")
    stop = getattr(config, "stop_strings", None) if stop is None else stop
    stop = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)

    room = context - prompt_tokens
    longest = given.get("max_new_tokens")
    if longest is None:
        longest = min(512, room)
        if longest < 1:
            raise ValueError(
                f"{name} has {prompt_tokens} tokens and fills the model's context of {context}: "
                "shorten it, or pass truncate_prompt"
            )
    else:
        check_whole("max_new_tokens", longest, low=1)
        if longest > room:
            raise ValueError(
                f"{name} has {prompt_tokens} tokens, which with max_new_tokens={longest} pass the "
                f"model's context of {context}"
            )
    least = given.get("min_new_tokens") or 0
    if least > longest:
        raise ValueError(
            f"min_new_tokens={least} is more than max_new_tokens={longest} of {name}"
        )
    texts = {
        option: given[option]
        for option in ("include_stop", "skip_special_tokens")
        if given.get(option) is not None
    }
    return SamplingParams(
        **params,
        **texts,
        max_new_tokens=longest,
        min_new_tokens=least,
        end_ids=tuple(dict.fromkeys([*ends, *stop_ids])),
        stop=stop,
    )


@cache
def _log_ends(config: tuple[int, ...], tokenizer: tuple[int, ...]) -> None:
    """Log once that a model's two lists of end tokens differ."""
    LOG.warning(
        "the generation config ends samples at the tokens %s, the tokenizer at %s: samples end at "
        "any of them; end_token_ids= replaces both lists", list(config), list(tokenizer),
    )  # fmt: skip


def config_ends(generation_config: Any) -> list[int]:
    """The end tokens of a generation config."""
    ends = getattr(generation_config, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def tokenizer_ends(tokenizer: Any, vocab: int) -> list[int]:
    """The end token of a tokenizer, if the model can give it; a chat model's ends a turn."""
    end = getattr(tokenizer, "eos_token_id", None)
    return [end] if isinstance(end, int) and 0 <= end < vocab else []


def _ids(name: str, ids: Any, vocab: int) -> list[int]:
    if ids is None:
        return []
    ids = [ids] if isinstance(ids, int) else list(ids)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise TypeError(f"{name} must be token ids, got {i!r}")
        if not 0 <= i < vocab:
            raise ValueError(f"{name} must lie in the vocabulary of {vocab}, got {i}")
    return ids
