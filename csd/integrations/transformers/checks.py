"""Checks of a call of `transformers`' `generate`; errors name the option that is refused."""

from typing import Any

import torch

from csd.engine.options import SamplingOptions
from csd.engine.options.params import asks_for
from csd.utils.arguments import options_of

# generation config: option -> values that change nothing here
_CONFIG = {
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "static"),
    "stop_strings": (None,),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}

# model_kwargs that `generate` itself adds
_PASSED = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
}

# arguments of `generate` itself that change the samples
_ARGUMENTS = (
    "assistant_model",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "prefix_allowed_tokens_fn",
)

# logits processor -> its attribute -> the option of the generation config that makes it
_PROCESSORS = {"MinLengthLogitsProcessor": ("min_length", "min_length")} | {
    processor: (attribute, option.config or name)
    for name, (_, option) in options_of(SamplingOptions).items()
    for processor, _, attribute in [option.processor.partition(".")]
}
# processors that read more than a row's own tokens and logits: its index in the batch, a model,
# state of earlier calls
_NOT_OF_ROWS = (
    "PrefixConstrainedLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "HammingDiversityLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
)
_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")


def refuse_call(
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    caller: dict,
    synced_gpus: bool,
    streamer: Any,
    model_kwargs: dict,
) -> None:
    """Raise for arguments that csd does not support. caller: locals of the running `generate`."""
    kwargs = caller.get("kwargs", {})
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        _refuse("inputs_embeds: csd drafts and verifies token ids; pass input_ids")
    # if it is not given, generate derives it from the model and the process group
    if synced_gpus or caller.get("synced_gpus"):
        _refuse("synced_gpus: gather the weights into a plain model on each rank")
    if getattr(model_kwargs.get("past_key_values"), "_is_user_defined", False):
        _refuse("past_key_values: csd has its own cache of keys and values; pass the whole prompt")
    for name in _ARGUMENTS:
        if caller.get(name) is not None:
            _refuse(f"{name}={type(caller[name]).__name__}")
    if kwargs.get("position_ids") is not None:
        _refuse("position_ids: positions count the unpadded tokens")
    for name, value in model_kwargs.items():
        if name not in _PASSED and value is not None:
            _refuse(f"{name}={value if not torch.is_tensor(value) else tuple(value.shape)}")
    if streamer is not None and input_ids.shape[0] != 1:
        _refuse(f"a streamer for a batch of {input_ids.shape[0]}; it takes one row, one sample")
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have shape {tuple(input_ids.shape)}, got {tuple(mask.shape)}"
        )


def refuse_config(config: Any) -> None:
    message = asks_for(config)
    for name, off in _CONFIG.items():
        if message is None and getattr(config, name, None) not in off:
            message = name, getattr(config, name)
    if message is not None:
        _refuse(f"{message[0]}={message[1]!r} of the generation config")


def check_lists(config: Any, processors: Any, criteria: Any) -> list:
    """Logits processors of the caller, without those that `generate` made from the config.

    Raises NotImplementedError for stopping criteria of the caller, and for processors that are not
    functions of a row alone.
    """
    seen, own = set(), []
    for p in processors or ():
        name = type(p).__name__
        attribute, option = _PROCESSORS.get(name, ("", ""))
        if not option or type(p).__module__ != "transformers.generation.logits_process":
            if name in _NOT_OF_ROWS:
                _refuse(f"logits_processor {name}, which is not a function of a single row")
            own.append(p)
            continue
        value = getattr(p, attribute)
        value = value.tolist() if torch.is_tensor(value) else value
        if name in seen or value != getattr(config, option):
            _refuse(f"logits_processor {name}; set the option in the generation config if it has")
        seen.add(name)
    for c in criteria or ():
        if type(c).__name__ not in _CRITERIA:
            _refuse(f"stopping_criteria {type(c).__name__}")
    return own


def _refuse(what: str) -> None:
    raise NotImplementedError(f"csd.hf_generate does not serve {what}")
