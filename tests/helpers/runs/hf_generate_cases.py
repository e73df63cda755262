"""Calls of `model.generate` with `csd.hf_generate`, and options that it does not serve."""

import torch
import transformers
from helpers.models import checkpoints
from transformers import LogitsProcessorList, StoppingCriteriaList

import csd

ROWS = [[5, 9, 23], [7, 40, 3, 11, 60], [31, 8, 8, 77, 50, 12, 6, 90, 4]]


def left_padded(rows, pad=0):
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    return ids, mask


def generate(model, rows, seed=11, **options):
    ids, mask = left_padded(rows)
    torch.manual_seed(seed)
    options = dict(do_sample=True, max_new_tokens=24) | options
    return model.generate(ids, attention_mask=mask, custom_generate=csd.hf_generate, **options)


def new_tokens(out, width, pad=0):
    """Each row's new tokens without the padding behind an end token."""
    rows = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, t in enumerate(row) if t in checkpoints.STOP), len(row))
        assert row[end:] == [pad] * (len(row) - end)
        rows.append(row[:end])
    return rows


class Halved(transformers.LogitsProcessor):
    """Halves the logits behind an even token."""

    def __call__(self, input_ids, scores):
        return torch.where(input_ids[:, -1:] % 2 == 0, scores / 2, scores)


class Collect(transformers.generation.BaseStreamer):
    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1


class Never(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def cache(model):
    return transformers.DynamicCache(config=model.config)


REFUSED = {
    "num_beams=3": dict(num_beams=3),
    "eta_cutoff=0.5": dict(eta_cutoff=0.5),
    "synced_gpus": dict(synced_gpus=True),
    "past_key_values": lambda model: dict(past_key_values=cache(model)),
    "inputs_embeds": lambda model: dict(inputs_embeds=torch.zeros(1, 3, 40)),
    "logits_processor PrefixConstrained": dict(
        logits_processor=LogitsProcessorList(
            [transformers.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1], 1)]
        )
    ),
    "logits_processor TopKLogitsWarper": dict(
        logits_processor=LogitsProcessorList([transformers.TopKLogitsWarper(3)])
    ),
    "stopping_criteria Never": dict(stopping_criteria=StoppingCriteriaList([Never()])),
    "max_time=1.0": dict(max_time=1.0),
    "assistant_model": lambda model: dict(assistant_model=model),
    "prompt_lookup_num_tokens=3": dict(prompt_lookup_num_tokens=3),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=lambda batch, ids: [1]),
    "position_ids": dict(position_ids=torch.tensor([[4, 5, 6]])),
    "output_attentions": dict(output_attentions=True),
    "cache_implementation='offloaded'": dict(cache_implementation="offloaded"),
    "begin_suppress_tokens": dict(begin_suppress_tokens=[3]),
}
