"""`transformers` generate with a static cache, compiled and not, at N = 16."""

import torch

from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import RECORDED_VOCAB, shapes

SAMPLES = 16


def run(section: Section) -> None:
    """Time the Llama shape with random weights, on which a step's time does not depend."""
    model = build(section)
    prompt, new = (1024, 128) if section.cuda else (32, 4)
    ids = torch.randint(RECORDED_VOCAB, (SAMPLES, prompt), device=section.device)
    mask = torch.ones_like(ids)

    def draw(tokens: int, compiled: bool) -> None:
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            temperature=0.7,
            top_k=0,
            cache_implementation="static",
            pad_token_id=0,
            disable_compile=not compiled,
        )

    def measure(tokens: int, compiled: bool) -> None:
        whole = section.clock(lambda: draw(tokens, compiled))
        prefill = section.clock(lambda: draw(1, compiled))
        section.add(
            N=SAMPLES,
            prompt=prompt,
            compiled=compiled,
            new_tokens=tokens,
            tokens_per_second=SAMPLES * tokens / whole,
            step_ms=(whole - prefill) / (tokens - 1) * 1e3,
        )

    # this row exists however long the compilation takes
    draw(2, False)
    measure(new // 4 if section.cuda else new, False)
    if not section.cuda:
        return
    # generate compiles automatically with a static cache on a GPU
    section.facts["compiling, s"] = section.clock(lambda: draw(new, True))
    while len(section.rows) < 4 and section.left > 0:
        measure(new, True)


def build(section: Section):
    from transformers import LlamaConfig, LlamaForCausalLM

    c = next(iter(shapes(section).values()))
    size = dict(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.intermediate,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=min(c.context, 8192),
    )
    dtype = section.dtype
    config = LlamaConfig(**size, bos_token_id=None, eos_token_id=None, dtype=dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(section.device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
