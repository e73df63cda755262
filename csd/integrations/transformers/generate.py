"""csd inside `transformers`: `model.generate(..., custom_generate=csd.hf_generate)`.

The `scores` and `logits` of `generate` come from one forward pass over finished sequences.
Options that csd does not serve are refused by name.
"""

import copy
import inspect
import sys
from types import FrameType
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from csd.engine.generate import engine_for
from csd.engine.options import SamplingOptions, read_options
from csd.engine.options.params import asks_for, limited, resolve
from csd.engine.requests.request import LiveSample, Request
from csd.graph.prior import Prior
from csd.integrations.groups import draw_rows
from csd.state.filters import GREEDY
from csd.traces.history import History
from csd.utils.arguments import options_of
from csd.utils.torch_state import plain_torch


@torch.no_grad()
def scores_of(
    model: torch.nn.Module,
    sequences: torch.Tensor,
    mask: torch.Tensor | None,
    width: int,
    processors: Any,
    config: Any,
) -> dict:
    """Returns the requested ones of "scores" and "logits": [batch, vocab] float32 per new token.

    sequences: [batch, width + new]; mask: [batch, width] or None. csd keeps no logits of a step, so
    the model reads prompts and samples once more; processors then get each prefix in turn, as in
    `generate`. Rows that have ended continue over padding, also as in `generate`.
    """
    if not (config.output_scores or config.output_logits):
        return {}
    read = sequences[:, :-1]
    new = sequences.shape[1] - width
    if mask is None:
        mask = torch.ones_like(sequences[:, :width])
    grown = torch.nn.functional.pad(mask, (0, new - 1), value=1)
    position = (grown.long().cumsum(-1) - 1).masked_fill(grown == 0, 0)
    logits = model(
        input_ids=read,
        attention_mask=grown,
        position_ids=position,
        logits_to_keep=new,
        use_cache=False,
    ).logits.float()
    fields = {}
    if config.output_logits:
        fields["logits"] = tuple(logits.unbind(1))
    if config.output_scores:
        fields["scores"] = tuple(
            processors(sequences[:, : width + i], logits[:, i].clone()) for i in range(new)
        )
    return fields


@plain_torch()
def hf_generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    seed: int | None = None,
    first_sample: int = 0,
    budget: str | int = "auto",
    speculate: bool = True,
    history: History | None = None,
    prior: Prior | str | bool | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decoding method for the `custom_generate` argument of `transformers`' `generate`.

    `generate` calls it with the arguments up to `streamer` and `model_kwargs`. Batches may have any
    size; padding is removed by `attention_mask`, and equal rows are one group, adjacent or not. The
    generation config that `generate` made applies: `do_sample`, filters (top_k is 50 by
    transformers' default), no_repeat_ngram_size, bad_words_ids, suppress_tokens, lengths and end
    tokens. Processors that
    the caller passes get rows without padding, and must be functions of these rows alone.

    Arguments of csd, which `generate` passes through:

    seed: drawn from torch's default generator when None, so `torch.manual_seed` determines it.
    first_sample: index of each prompt's first sample; calls with 0 and then 8 draw 16 samples in
        two calls of 8.
    budget, speculate, prior: as in `csd.generate`; the rows of a batch are one call. history: a
        `csd.History`, which is read before the call and extended after it.

    Returns ids [batch, longest] as `generate` does, padded with `pad_token_id` or, without one, the
    first end id; with `return_dict_in_generate` an output object. `output_scores` and
    `output_logits` cost one more forward over the finished sequences. `past_key_values` is always
    None.

    Raises ValueError or NotImplementedError naming the option that csd does not support: beams,
    `inputs_embeds`, `synced_gpus`, a passed cache, stopping criteria, processors that read more
    than their row, ...
    """
    if generation_config is None:
        raise TypeError(
            "generation_config must be the one made by generate, got None: call "
            "model.generate(..., custom_generate=csd.hf_generate)"
        )
    caller = _generate_frame()
    streamer = caller.get("streamer") if streamer is None else streamer
    mask = model_kwargs.get("attention_mask")
    refuse_call(input_ids, mask, caller, synced_gpus, streamer, model_kwargs)
    # min_length is supported: `_lengths` turns it into a number of new tokens
    config = copy.copy(generation_config)
    config.min_length = None
    refuse_config(config)
    functions = check_lists(generation_config, logits_processor, stopping_criteria)

    if history is not None and not isinstance(history, History):
        raise TypeError(f"history must be a csd.History, got {type(history).__name__}")
    engine = engine_for(model)
    model_config = engine.config
    rows = _rows(input_ids, mask)
    vocab = model_config.vocab
    for i in (min(map(min, rows)), max(map(max, rows))):
        if not 0 <= i < vocab:
            raise ValueError(f"input_ids must lie in the vocabulary of {vocab}, got {i}")
    width = input_ids.shape[1]
    # lengths are the same for all rows
    longest = max(range(len(rows)), key=lambda i: len(rows[i]))
    arguments: dict[str, Any] = _lengths(generation_config, width)
    arguments |= dict(logits_processor=functions) if functions else {}
    arguments |= {} if generation_config.do_sample else GREEDY
    params = resolve(config, read_options(arguments, SamplingOptions), vocab=vocab)
    params = limited(params, model_config.context, len(rows[longest]), f"row {longest}")
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))

    def on_tokens(request: Request, live: LiveSample, tokens: list[int], text: str) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))

    samples = draw_rows(
        engine,
        rows,
        params,
        seed=seed,
        first_sample=first_sample,
        budget=budget,
        speculate=speculate,
        on_tokens=None if streamer is None else on_tokens,
        history=history,
        prior=prior,
    )
    if streamer is not None:
        streamer.end()
    tokens = [torch.tensor(s.tokens, dtype=input_ids.dtype) for s in samples]
    new = pad_sequence(tokens, batch_first=True, padding_value=_pad_id(generation_config))
    sequences = torch.cat([input_ids, new.to(input_ids)], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences

    from transformers.generation import GenerateDecoderOnlyOutput

    fields = scores_of(model, sequences, mask, width, logits_processor, generation_config)
    return GenerateDecoderOnlyOutput(sequences=sequences, **fields)


def _generate_frame() -> dict:
    """Local variables, arguments included, of the running `generate`; {} if none is running.

    With a callable as `custom_generate`, transformers (5.17 to 5.23) drops its arguments
    `streamer`, `synced_gpus` and `assistant_model` without a warning, after it has passed the
    prompt to the streamer.
    """
    from transformers import GenerationMixin

    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _rows(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    # transformers passes no mask when nothing is padding
    if mask is None:
        return input_ids.tolist()
    rows = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(f"attention_mask must keep at least one token of row {i}")
    return rows


def _lengths(config: Any, width: int) -> dict:
    """Limits in new tokens: transformers' max_length and min_length include the padded prompt."""
    least = max((config.min_length or 0) - width, config.min_new_tokens or 0, 0)
    return {"max_new_tokens": config.max_length - width, "min_new_tokens": least}


def _pad_id(config: Any) -> int:
    for ids in (config.pad_token_id, config.eos_token_id):
        if ids is not None:
            return ids if isinstance(ids, int) else ids[0]
    # without end tokens every row has the same length, and nothing is padded
    return 0


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
