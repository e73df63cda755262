"""Tiny random models of the decoder families of transformers, as data.

Windows and chunks are shorter than the prompt of the tests, so each hides tokens in them.
"""

import copy
from functools import partial

import torch
import transformers

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
WINDOW = 9
HEAD = dict(head_dim=8)
SLIDING = dict(sliding_window=WINDOW)
MIXED = SLIDING | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
EXPERTS = dict(
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
DEEPSEEK = EXPERTS | dict(
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=1,
    kv_lora_rank=12,
    q_lora_rank=12,
    qk_rope_head_dim=4,
    qk_nope_head_dim=12,
    v_head_dim=12,
    num_key_value_heads=4,
)

LINEAR = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
SHARED = dict(shared_expert_intermediate_size=24)
CONVOLVED = ["conv", "full_attention", "conv"]
MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=16
)


def yarn(factor=4.0, old=32):
    return dict(
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=factor,
            original_max_position_embeddings=old,
        )
    )


# the family is the name up to a space
MODULES: dict[str, dict] = {
    "llama": {},
    "llama yarn": yarn(),
    "llama linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "llama biased": dict(attention_bias=True, mlp_bias=True),
    "qwen2": {},
    "qwen2 window": SLIDING | dict(use_sliding_window=True, max_window_layers=1),
    "qwen3": HEAD,
    "qwen3 window": HEAD | SLIDING | dict(use_sliding_window=True, max_window_layers=1),
    "mistral": SLIDING,
    "gemma": HEAD,
    "gemma2": HEAD
    | MIXED
    | dict(query_pre_attn_scalar=20, attn_logit_softcapping=2.0, final_logit_softcapping=4.0),
    "gemma3_text": HEAD | MIXED | dict(query_pre_attn_scalar=20),
    "gemma3n_text": HEAD
    | MIXED
    | dict(
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
        vocab_size_per_layer_input=61,
        activation_sparsity_pattern=None,
    ),
    "gemma4_text": HEAD
    | MIXED
    | dict(
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=61,
        global_head_dim=16,
    ),
    "vaultgemma": HEAD | MIXED | dict(query_pre_attn_scalar=20),
    "olmo": dict(clip_qkv=2.0),
    "olmo2": {},
    "olmo3": MIXED,
    "olmo3 yarn": MIXED
    | dict(
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            full_attention=yarn()["rope_parameters"],
        )
    ),
    "glm": HEAD,
    "glm4": HEAD,
    "cohere": {},
    "cohere2": HEAD | MIXED,
    "stablelm": {},
    "nemotron": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phi3 window": SLIDING,
    "phi3 partial": dict(
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
    ),
    "starcoder2": SLIDING,
    "gpt2": dict(n_embd=32, n_layer=3, n_head=4, n_positions=128),
    "gpt_neox": {},
    "gpt_bigcode": dict(n_embd=32, n_layer=3, n_head=4, n_positions=128),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "biogpt": {},
    "seed_oss": HEAD,
    "ernie4_5": HEAD,
    "hunyuan_v1_dense": HEAD,
    "helium": HEAD,
    "apertus": {},
    "arcee": {},
    "nanochat": {},
    "bitnet": {},
    "smollm3": dict(no_rope_layers=[1, 0, 1]),
    "granite": dict(
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "granite_swa": MIXED,
    "exaone4": MIXED | dict(sliding_window_pattern=2),
    "ministral": HEAD | MIXED,
    "ministral3": HEAD,
    "diffllama": {},
    "hrm_text": {},
    "jais2": {},
    "modernbert-decoder": dict(
        local_attention=2 * WINDOW,
        layer_types=MIXED["layer_types"],
        sep_token_id=0,
        cls_token_id=0,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "lfm2": dict(layer_types=["full_attention"] * 3),
    "qwen2_moe": EXPERTS | dict(shared_expert_intermediate_size=24, decoder_sparse_step=1),
    "qwen3_moe": HEAD
    | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True),
    "mixtral": EXPERTS | SLIDING,
    "gpt_oss": HEAD | EXPERTS | MIXED,
    "phimoe": EXPERTS,
    "olmoe": EXPERTS,
    "flex_olmo": EXPERTS,
    "granitemoe": EXPERTS,
    "granitemoeshared": EXPERTS | dict(shared_intermediate_size=24),
    "granitemoehybrid": EXPERTS
    | dict(
        layer_types=["attention"] * 3,
        shared_intermediate_size=24,
        position_embedding_type="rope",
        mamba_n_heads=4,
    ),
    "glm4_moe": HEAD | DEEPSEEK | dict(num_key_value_heads=2),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "youtu": DEEPSEEK,
    "minicpm3": DEEPSEEK,
    "minimax_m2": HEAD | EXPERTS,
    "dots1": HEAD | DEEPSEEK | dict(num_key_value_heads=2),
    "dbrx": dict(
        d_model=32,
        n_heads=4,
        n_layers=3,
        max_seq_len=128,
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=3.0),
        ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, hidden_size=32),
    ),
    "llama4_text": HEAD
    | EXPERTS
    | dict(
        attention_chunk_size=8,
        intermediate_size_mlp=48,
        no_rope_layers=[1, 0, 1],
        interleave_moe_layer_step=2,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
    ),
    "jetmoe": EXPERTS | dict(kv_channels=8, num_key_value_heads=2, num_attention_heads=4),
    "mimo_v2_flash": HEAD | EXPERTS | MIXED,
    "afmoe": HEAD | EXPERTS | MIXED,
    "ernie4_5_moe": EXPERTS | dict(moe_num_experts=4, moe_k=2),
    "hunyuan_v1_moe": HEAD | EXPERTS,
    "exaone_moe": HEAD | EXPERTS | MIXED,
    "solar_open": HEAD | DEEPSEEK | dict(num_key_value_heads=2),
    "cohere2_moe": HEAD | EXPERTS | MIXED,
    "laguna": HEAD | EXPERTS | MIXED,
    # with layers that have a state
    "qwen3_next": HEAD | EXPERTS | LINEAR | SHARED,
    "qwen3_5_text": HEAD | LINEAR,
    "qwen3_5_moe_text": HEAD | EXPERTS | LINEAR | SHARED,
    "olmo_hybrid": HEAD | LINEAR,
    "lfm2 conv": dict(layer_types=CONVOLVED),
    "lfm2_moe": EXPERTS | dict(layer_types=CONVOLVED, num_dense_layers=1),
    "lfm3": dict(layer_types=CONVOLVED),
    "nemotron_h": HEAD
    | EXPERTS
    | dict(
        layers_block_type=["linear_attention", "full_attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
    ),
    "granitemoehybrid mamba": EXPERTS
    | MAMBA
    | dict(layer_types=["mamba", "attention", "mamba"], shared_intermediate_size=24),
    "bamba": MAMBA | dict(attn_layer_indices=[1]),
    "falcon_h1": HEAD | MAMBA | dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_n_groups=1),
    "zamba2": dict(
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=1,
        chunk_size=16,
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_mem_blocks=1,
        adapter_rank=4,
    ),
}


def longrope(context=32):
    return dict(
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            original_max_position_embeddings=context,
            short_factor=[1.0, 1.1, 1.3, 1.6],
            long_factor=[2.0] * 4,
            factor=4.0,
        ),
        original_max_position_embeddings=context,
    )


# what csd's message names
REFUSED: dict[str, tuple[dict, str]] = {
    "mamba2": (
        dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=16),
        "not purely recurrent models",
    ),
    "jamba": (
        EXPERTS | dict(mamba_d_state=8, mamba_dt_rank=4, attn_layer_offset=1, attn_layer_period=2),
        "a recurrent state",
    ),
    "kimi_linear": (
        EXPERTS
        | dict(
            linear_attn_config=dict(
                kda_layers=[1, 3],
                full_attn_layers=[2],
                num_heads=4,
                head_dim=8,
                short_conv_kernel_size=4,
            )
        ),
        "a recurrent state",
    ),
    "minimax": (HEAD | EXPERTS | dict(layer_types=LINEAR["layer_types"]), "a recurrent state"),
    "recurrent_gemma": (dict(lru_width=32, attention_window_size=8), "with a state"),
    "llama dynamic": (
        dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)),
        "longest sequence of a batch",
    ),
    "phi3 longrope": (longrope(), "longest sequence of a batch"),
    "bloom": (dict(n_layer=2, n_head=4), "AttentionInterface"),
    "mpt": (dict(d_model=32, n_heads=4, n_layers=2), "AttentionInterface"),
    "falcon": ({}, "AttentionInterface"),
    "gptj": (dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4), "AttentionInterface"),
    "doge": ({}, "mask"),
    "bart": (
        dict(d_model=32, decoder_layers=2, decoder_attention_heads=4),
        "encoder-decoder|position_ids",
    ),
}


def config(name: str, **changes):
    extra = MODULES[name] if name in MODULES else REFUSED[name][0]
    # a family may change its lists in place
    made = copy.deepcopy(SIZES | extra | changes)
    return transformers.AutoConfig.for_model(name.split()[0], **made)


def build(name: str, dtype=torch.float64, seed: int = 0, **changes):
    """A model in evaluation mode whose logits differ by several units."""
    made = config(name, **changes)
    # grouped products have no float64
    made._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for part, weight in model.named_parameters():
            spread, middle = (0.2, 1.0) if "norm" in part else (0.3, 0.0)
            if part.endswith("A_log"):
                # states that last for dozens of tokens
                middle = -4.0
            weight.copy_(normal(weight.shape) * spread + middle)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return convert(model, dtype).eval()


def convert(model, dtype):
    """Parameters in another dtype; buffers, such as rotary frequencies, stay float32."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    return model
