"""How the samples of one prompt are drawn and when they end."""

import math
from dataclasses import dataclass, field
from typing import Any

from csd.arguments import whole
from csd.slots import MAX_STOP_IDS

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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Filters apply in transformers' order: penalty, temperature, top-k, top-p, min-p."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 512
    min_new_tokens: int = 0
    end_ids: tuple[int, ...] = ()  # the model's end tokens and `stop_token_ids`
    ignore_eos: bool = False
    stop: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0)
        _number("top_p", self.top_p, low=0, high=1, above=True)
        _number("min_p", self.min_p, low=0, high=1)
        _number("repetition_penalty", self.repetition_penalty, low=0, above=True)
        whole("top_k", self.top_k, low=0)
        whole("max_new_tokens", self.max_new_tokens, low=1)
        whole("min_new_tokens", self.min_new_tokens, low=0)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop must be non-empty strings, got {list(self.stop)!r}")
        if len(self.end_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"at most {MAX_STOP_IDS} end tokens are supported, got {len(self.end_ids)}"
            )

    @property
    def stopping_ids(self) -> tuple[int, ...]:
        return () if self.ignore_eos else self.end_ids


def asks_for(generation_config: Any) -> tuple[str, object] | None:
    """The first option of a generation config that csd does not implement, with its value."""
    for name, off in _UNSUPPORTED.items():
        value = getattr(generation_config, name, None)
        if not any(value == o and type(value) in (type(o), int, float) for o in off):
            return name, value
    return None


def resolve(
    generation_config: Any, *, context: int, longest_prompt: int, vocab: int, **given: Any
) -> SamplingParams:
    """SamplingParams of a call: what was given, then the model's generation config, then off.

    `given` holds the arguments of `csd.generate`; None means not given. `do_sample` of the
    generation config is ignored. `max_new_tokens` is 512, cut to what the context still holds; a
    given one that does not fit is an error.
    """
    config = generation_config
    asked = asks_for(config)
    if asked is not None:
        name, value = asked
        raise ValueError(
            f"the model's generation config asks for {name}={value!r}, which csd does not "
            f"implement; set model.generation_config.{name} = None (or remove it from "
            "generation_config.json) to sample without it"
        )
    params = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = given.get(name)
        value = getattr(config, name, None) if value is None else value
        if value is not None:
            params[name] = value

    ends = getattr(config, "eos_token_id", None)
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    stop_ids = _ids("stop_token_ids", given.get("stop_token_ids"), vocab)
    if given.get("ignore_eos"):
        ends = []
    stop = given.get("stop")
    stop = getattr(config, "stop_strings", None) if stop is None else stop
    stop = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)

    room = context - longest_prompt
    longest = given.get("max_new_tokens")
    if longest is None:
        longest = min(512, room)
        if longest < 1:
            raise ValueError(
                f"the prompt has {longest_prompt} tokens and fills the model's context of {context}"
            )
    else:
        whole("max_new_tokens", longest, low=1)
        if longest > room:
            raise ValueError(
                f"the prompt's {longest_prompt} tokens and max_new_tokens={longest} pass the "
                f"model's context of {context}"
            )
    least = given.get("min_new_tokens") or 0
    if least > longest:
        raise ValueError(f"min_new_tokens={least} is more than max_new_tokens={longest}")
    return SamplingParams(
        **params,
        max_new_tokens=longest,
        min_new_tokens=least,
        end_ids=tuple(dict.fromkeys([*ends, *stop_ids])),
        stop=stop,
    )


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


def _number(name: str, value: Any, low: float, high: float = math.inf, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    inside = low < value <= high if above else low <= value <= high
    if not inside or math.isinf(value):
        bracket = "(" if above else "["
        end = f"{high}]" if high < math.inf else "inf)"
        raise ValueError(f"{name} must lie in {bracket}{low}, {end}, got {value}")
