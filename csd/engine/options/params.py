"""Sampling parameters of one prompt: how its samples are drawn and when they end."""

import logging
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

from csd.engine.options import SamplingOptions
from csd.engine.options.grammar import GRAMMARS
from csd.engine.options.logit_params import LogitOptions, check_vocabulary, row_params, without_ends
from csd.state.filters import FILTERS, GREEDY, SHARES
from csd.state.slots import MAX_STOP_IDS
from csd.utils.arguments import check_ids, options_of

LOG = logging.getLogger("csd")

OF_CONFIG = " of the model's generation config"

# arguments that change logits before the filters
RULES = tuple(options_of(LogitOptions))
# those that follow from a text's tokens alone, so that a given text can be scored
TOKEN_RULES = tuple(
    name
    for name in RULES
    if name not in ("logits_processor", "max_thinking_tokens", "thinking_tags", *GRAMMARS)
)

# the arguments that name end tokens
ENDS = ("stop_token_ids", "end_token_ids", "ignore_eos")

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
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "renormalize_logits": (None, False),
    "watermarking_config": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "dola_layers": (None,),
}
# options of transformers' `generate` that change no sample at these values
_OF_CALLS: dict[str, tuple] = {
    "num_return_sequences": (None, 1),
    "use_cache": (None, True, False),
    # options of beam search
    "early_stopping": (None, False),
    "length_penalty": (None, 1),
}


def _values() -> dict[str, Any]:
    off = {name: option.off for name, (_, option) in options_of(SamplingOptions).items()}
    # `resolve` makes one list of these
    for name in ENDS:
        del off[name]
    return off | {"end_ids": ()}


class SamplingParams(SimpleNamespace):
    """Checked values of the options that decide how samples are drawn and when they end.

    Attributes are the arguments in `SamplingOptions`, each by default with the value that turns it
    off. In place of those in `ENDS` there is `end_ids`, every token that ends a sample. `bad_words`
    and `thinking_tags` are token ids. Logits are changed first, then filtered as in transformers.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = _values()

    def __init__(self, **values: Any):
        if unknown := values.keys() - self.DEFAULTS.keys():
            raise TypeError(f"unknown parameters {sorted(unknown)}")
        super().__init__(**self.DEFAULTS | values)

    def replace(self, **values: Any) -> "SamplingParams":
        """Returns a copy with other values."""
        return SamplingParams(**vars(self) | values)

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken instead of a sample."""
        return vars(self).items() >= GREEDY.items()


def asks_for(generation_config: Any) -> tuple[str, object] | None:
    """First option set in a generation config that csd does not implement, and its value."""
    for name, off in _UNSUPPORTED.items():
        value = getattr(generation_config, name, None)
        if not _is_one_of(value, off):
            return name, value
    return None


def is_off(name: str, value: object) -> bool:
    """True if an argument of transformers' `generate` has no effect at this value."""
    served: dict[str, tuple] = {
        option.config: (None, option.off, [])
        for _, option in options_of(SamplingOptions).values()
        if option.config is not None
    }
    return _is_one_of(value, (served | _UNSUPPORTED | _OF_CALLS).get(name, ()))


def _is_one_of(value: object, off: tuple) -> bool:
    return any(value == o and type(value) in (type(o), int, float) for o in off)


def resolve(
    generation_config: Any, options: Mapping[str, Any], *, vocab: int, tokenizer: Any = None
) -> SamplingParams:
    """SamplingParams of a call: arguments first, then the model's generation config, then off.

    options: read `SamplingOptions`; None means not given. `do_sample` of the generation config is
    ignored. `limited` completes the lengths for a prompt.
    tokenizer: its end token ends samples too, in addition to those of the generation config.
    """
    config = generation_config
    asked = asks_for(config)
    if asked is not None:
        unknown, value = asked
        raise ValueError(
            f"the model's generation config sets {unknown}={value!r}, which csd does not "
            f"implement; set model.generation_config.{unknown} = None (or remove it from "
            "generation_config.json) to sample without it"
        )
    values = {}
    for name, (_, option) in options_of(SamplingOptions).items():
        value = options[name]
        if value is None and option.config is not None:
            value = getattr(config, option.config, None)
            if value is not None and option.check is not None:
                value = option.check(option.config + OF_CONFIG, value)
                if name == "bad_words":
                    value = without_ends(value, config)
        values[name] = option.off if value is None else value
    for name in SHARES:
        if values[name] == 0:
            # clients send it with temperature 0, where no filter has an effect
            if values["temperature"] != 0:
                of, heat = OF_CONFIG if options[name] is None else "", values["temperature"]
                raise ValueError(f"{name}{of} must lie in (0, 1], got 0 with temperature {heat}")
            values[name] = FILTERS[name]

    stop_ids, ends, ignored = (values.pop(name) for name in ENDS)
    check_vocabulary({"stop_token_ids": stop_ids, "end_token_ids": ends or ()}, vocab)
    if ignored:
        ends = []
    elif ends is None:
        ends, more = config_ends(config, vocab), tokenizer_ends(tokenizer, vocab)
        if set(more) - set(ends):
            _log_ends(tuple(ends), tuple(more))
        ends = [*ends, *more]
    ends = tuple(dict.fromkeys([*ends, *stop_ids]))
    if len(ends) > MAX_STOP_IDS:
        raise ValueError(
            f"stop_token_ids and the model's end tokens must be at most {MAX_STOP_IDS}, got "
            f"{len(ends)}"
        )
    values |= row_params({name: values[name] for name in RULES}, tokenizer, vocab)
    # None: as long as the context allows
    values["max_new_tokens"] = options["max_new_tokens"]
    return SamplingParams(**values, end_ids=ends)


def resolve_for_given(
    generation_config: Any,
    options: Mapping[str, Any],
    longest: int,
    *,
    vocab: int,
    tokenizer: Any = None,
) -> SamplingParams:
    """`resolve` for completions that are given, of at most `longest` tokens.

    Filters and constraints are those of `options` alone. End tokens end nothing, but
    `min_new_tokens` bans the ones with which sampling would end.
    """
    least = min(options["min_new_tokens"] or 0, longest)
    asked = {**options, "min_new_tokens": least, "max_new_tokens": longest}
    if not least:
        asked |= {"ignore_eos": True, "stop_token_ids": ()}
    ends = SimpleNamespace(eos_token_id=getattr(generation_config, "eos_token_id", None))
    return resolve(ends, asked, vocab=vocab, tokenizer=tokenizer)


def limited(
    params: SamplingParams, context: int, prompt_tokens: int = 0, name: str = "an empty prompt"
) -> SamplingParams:
    """Parameters of a prompt, whose `max_new_tokens` fit the context behind it.

    By default 512, or less if the context has less room; a given value that does not fit is an
    error. name: of the prompt, in error messages. Without prompt_tokens: checks for any prompt.
    """
    room, longest = context - prompt_tokens, params.max_new_tokens
    if longest is None:
        longest = min(SamplingParams.DEFAULTS["max_new_tokens"], room)
        if longest < 1:
            raise ValueError(
                f"{name} has {prompt_tokens} tokens, which leaves no room in the model's context "
                f"of {context}: shorten it, or pass truncate_prompt"
            )
    elif not prompt_tokens and longest > context:
        raise ValueError(f"max_new_tokens={longest} exceeds the model's context of {context}")
    elif longest > room:
        raise ValueError(
            f"{name} has {prompt_tokens} tokens, which with max_new_tokens={longest} exceed "
            f"the model's context of {context}"
        )
    if params.min_new_tokens > longest:
        # a default max_new_tokens depends on the prompt, so the message names that
        of = f" of {name}" if params.max_new_tokens is None else ""
        raise ValueError(
            f"min_new_tokens must be at most max_new_tokens={longest}{of}, got "
            f"{params.min_new_tokens}"
        )
    return params.replace(max_new_tokens=longest)


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
