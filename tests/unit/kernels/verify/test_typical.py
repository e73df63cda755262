"""Locally typical sampling keeps the tokens that transformers' TypicalLogitsWarper keeps."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from csd.kernels.verify.cpu.path import token_logprobs
from csd.kernels.verify.token_logprobs import token_logprobs_ref
from csd.research.verify.multi_draft import processed
from csd.state.pool_builder import roots
from csd.state.slots import Slots

VOCAB, ROWS = 211, 24
# filters in transformers' order; typical_p is the last
CASES = [
    dict(typical_p=0.2),
    dict(typical_p=0.95),
    dict(temperature=1.7, typical_p=0.5),
    dict(temperature=0.6, top_k=40, typical_p=0.7),
    dict(top_p=0.9, typical_p=0.6),
    dict(min_p=0.02, typical_p=0.8),
    dict(temperature=1.4, top_k=60, top_p=0.95, min_p=0.01, typical_p=0.4),
]


def at_roots(vocab=VOCAB, rows=ROWS, **options):
    slots = Slots.empty(rows, vocab, 4, 2)
    slots.live[:], slots.group[:], slots.max_new[:], slots.group_key[0] = True, 0, 4, 1
    slots.sample[:] = torch.arange(rows)
    for name, value in options.items():
        getattr(slots, name)[:] = value
    return roots(slots, rows), slots


def warped(logits, options):
    """Scores by the processors that transformers makes of a generation config."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    processors = model._get_logits_processor(config, input_ids_seq_length=1)
    return processors(torch.zeros(logits.shape[0], 1, dtype=torch.long), logits.clone())


def rows_of(kind):
    generator = torch.Generator().manual_seed(len(kind))
    logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
    logits *= torch.logspace(-1, 1, ROWS, dtype=torch.float64)[:, None]
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "banned":
        logits[:, ::3] = -torch.inf
    if kind == "deep":
        # half of the mass is below the head
        logits = torch.full_like(logits, -11.5) + logits.clamp(-0.3, 0.3)
        logits[:, 7] = torch.linspace(-8, 0, ROWS, dtype=torch.float64)
    return logits


@pytest.mark.parametrize("kind", ["random", "ties", "banned", "deep"])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_set_of_kept_tokens_is_transformers(options, kind):
    logits = rows_of(kind)
    pool, slots = at_roots(**options)
    probs = processed(logits, torch.arange(ROWS), pool, slots)
    want = warped(logits, options)
    if kind == "ties" and "top_p" in options:
        # transformers' top-p chooses among tied tokens by an unstable sort
        probs, want = probs.sort().values, want.sort().values
    assert torch.equal(probs > 0, want > -torch.inf)
    assert torch.allclose(probs, want.softmax(-1), rtol=1e-12)
    kept = (probs > 0).sum(-1)
    assert kept.min() < (logits > -torch.inf).sum(-1).max()


def test_the_likeliest_token_may_be_dropped():
    """A token that is likelier than the entropy suggests is not typical."""
    logits = torch.cat([torch.tensor([[2.0]]), torch.zeros(1, 60)], dim=1).double()
    pool, slots = at_roots(61, 1, typical_p=0.5)
    probs = processed(logits, torch.tensor([0]), pool, slots)[0]
    assert probs[0] == 0 and torch.allclose(probs[1:], torch.full((60,), 1 / 60).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "deep"])
def test_the_loop_keeps_what_the_reference_keeps(kind, dtype):
    """The same tokens of float64 logits; of others, up to tokens at the cut."""
    logits = rows_of(kind).to(dtype)
    pool, slots = at_roots(typical_p=0.7)
    row, token = torch.arange(ROWS).repeat_interleave(VOCAB), torch.arange(VOCAB).repeat(ROWS)

    def kept(run, logits):
        logprob = run(logits, pool, slots, row, token).logprob
        return logprob.view(ROWS, VOCAB) > -torch.inf

    got, want = (kept(run, logits) for run in (token_logprobs, token_logprobs_ref))
    if dtype == torch.float64:
        assert torch.equal(got, want)
    # a token within rounding of the cut may differ, no more than one value of a row
    exact = kept(token_logprobs_ref, logits.double())
    for found in (got, want):
        differ = found ^ exact
        values = logits.double().masked_fill(~differ, torch.nan)
        spread = values.nan_to_num(-torch.inf).amax(-1) - values.nan_to_num(torch.inf).amin(-1)
        assert (spread[differ.any(-1)] <= 1e-5).all()
