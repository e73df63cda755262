"""How the samples of one prompt are drawn and when they end."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from csd.schema.arguments import check_number, check_whole
from csd.state.slots import MAX_STOP_IDS

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
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            if "check" in f.metadata:
                f.metadata["check"](f.name, getattr(self, f.name))
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
    {*FILTERS, "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos"}
)


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
    for name in FILTERS:
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
        check_whole("max_new_tokens", longest, low=1)
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
