"""Facts of published config.json files, by the name of a checkpoint: what its layers compute with.

The vocabulary and the number of layers are of `build`, so that a random model of the shape fits; of
experts there are fewer, and windows of narrow models are short, so that they hide tokens. Names of
files, tokens and training are left out.
"""

from functools import partial

import torch
import transformers

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def rope(theta, **more):
    return dict(rope_type="default", rope_theta=theta) | more


PUBLISHED: dict[str, dict] = {
    "Llama-3.2-1B": dict(
        model_type="llama",
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_parameters=LLAMA3,
        tie_word_embeddings=True,
    ),
    "Mistral-7B-v0.3": dict(
        model_type="mistral",
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        rope_parameters=rope(1000000.0),
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-0.5B": dict(
        model_type="qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_attention_heads=14,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        rope_parameters=rope(1000000.0),
        use_sliding_window=False,
        sliding_window=32768,
        max_window_layers=24,
        tie_word_embeddings=True,
    ),
    "Qwen3-0.6B": dict(
        model_type="qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope_parameters=rope(1000000.0),
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=28,
        attention_bias=False,
        tie_word_embeddings=True,
    ),
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope_parameters=rope(1000000.0),
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=48,
        attention_bias=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "SmolLM3-3B": dict(
        model_type="smollm3",
        hidden_size=2048,
        intermediate_size=11008,
        num_attention_heads=16,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        max_position_embeddings=65536,
        rope_parameters=rope(5000000.0),
        no_rope_layers=[1, 0],
        no_rope_layer_interval=4,
        pretraining_tp=2,
        use_sliding_window=False,
        sliding_window=None,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
    ),
    "granite-3.3-2b-base": dict(
        model_type="granite",
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_parameters=rope(10000000.0),
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
    ),
    "phi-4": dict(
        model_type="phi3",
        hidden_size=5120,
        intermediate_size=17920,
        num_attention_heads=40,
        num_key_value_heads=10,
        rms_norm_eps=1e-5,
        max_position_embeddings=16384,
        original_max_position_embeddings=16384,
        rope_parameters=rope(250000.0),
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "OLMo-2-0425-1B": dict(
        model_type="olmo2",
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=16,
        num_key_value_heads=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_parameters=rope(500000.0),
        attention_bias=False,
        tie_word_embeddings=False,
    ),
    "Mistral-7B-v0.1": dict(
        model_type="mistral",
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        rope_parameters=rope(10000.0),
        sliding_window=4096,
        tie_word_embeddings=False,
    ),
    "Phi-3-mini-4k": dict(
        model_type="phi3",
        hidden_size=3072,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rope_parameters=rope(10000.0),
        sliding_window=2047,
        attention_bias=False,
        tie_word_embeddings=False,
    ),
    "Phi-4-mini": dict(
        model_type="phi3",
        hidden_size=3072,
        intermediate_size=8192,
        num_attention_heads=24,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            partial_rotary_factor=0.75,
            original_max_position_embeddings=4096,
            short_factor=[1.0] * 48,
            long_factor=[2.0] * 48,
        ),
        sliding_window=262144,
        attention_bias=False,
        mlp_bias=False,
        lm_head_bias=False,
        full_attn_mod=1,
        interpolate_factor=1,
        tie_word_embeddings=True,
    ),
    "Olmo-3-7B": dict(
        model_type="olmo3",
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        num_key_value_heads=32,
        rms_norm_eps=1e-6,
        max_position_embeddings=65536,
        rope_parameters=dict(
            sliding_attention=rope(500000.0),
            full_attention=dict(
                rope_type="yarn",
                rope_theta=500000.0,
                factor=8.0,
                beta_fast=32.0,
                beta_slow=1.0,
                attention_factor=1.2079441541679836,
                original_max_position_embeddings=8192,
            ),
        ),
        sliding_window=4096,
        layer_types=["sliding_attention", "full_attention"],
        attention_bias=False,
        tie_word_embeddings=False,
    ),
    "gemma-2-2b": dict(
        model_type="gemma2",
        hidden_size=2304,
        intermediate_size=9216,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        rms_norm_eps=1e-6,
        max_position_embeddings=8192,
        rope_parameters=rope(10000.0),
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        attention_bias=False,
        cache_implementation="hybrid",
        tie_word_embeddings=True,
    ),
    "gemma-3-1b": dict(
        model_type="gemma3_text",
        hidden_size=1152,
        intermediate_size=6912,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        rope_theta=1000000,
        rope_local_base_freq=10000,
        rope_scaling=None,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=False,
        cache_implementation="hybrid",
        tie_word_embeddings=True,
    ),
    "gemma-3-12b": dict(
        model_type="gemma3_text",
        hidden_size=3840,
        intermediate_size=15360,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        rms_norm_eps=1e-6,
        max_position_embeddings=131072,
        rope_theta=1000000,
        rope_local_base_freq=10000,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=1024,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=False,
        tie_word_embeddings=True,
    ),
}
# published configs of these families that the module runs, and what rules out the fused decoder
LEFT: dict[str, tuple[dict, str]] = {
    "Qwen1.5-MoE-like": (dict(model_type="qwen2_moe"), "model type 'qwen2_moe' is not supported"),
}
VOCAB, EXPERTS, WINDOW = 512, 12, 13


def config(facts: dict, divisor: int = 1, **changes):
    """divisor: of widths and heads that stay even; sizes of heads and all else are the file's."""
    made = dict(facts)
    made.setdefault("head_dim", made["hidden_size"] // made["num_attention_heads"])
    if divisor > 1:
        ratio = made["num_attention_heads"] // made["num_key_value_heads"]
        made["num_key_value_heads"] = max(1, made["num_key_value_heads"] // divisor)
        made["num_attention_heads"] = ratio * made["num_key_value_heads"]
        for name in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
            if name in made:
                made[name] //= divisor
        window = made.get("sliding_window")
        if window and window < made["max_position_embeddings"]:
            made["sliding_window"] = WINDOW
    if "num_experts" in made:
        made["num_experts"] = EXPERTS
    made |= dict(num_hidden_layers=2, vocab_size=VOCAB, pad_token_id=None, bos_token_id=None)
    return transformers.AutoConfig.for_model(**made | dict(eos_token_id=None) | changes)


def build(facts: dict, dtype, divisor: int = 1):
    """A random model in evaluation mode whose rows differ by several units of logits."""
    made = config(facts, divisor)
    made._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(normal(weight.shape) * 0.2 + ("norm" in part))
            else:
                weight.copy_(normal(weight.shape) * weight.shape[-1] ** -0.5)
        model.lm_head.weight.mul_(3 * getattr(made, "logits_scaling", 1.0))
        if made.tie_word_embeddings:
            # rows of the embedding that are multiplied would predict their own token
            root = made.hidden_size**0.5 if "gemma" in made.model_type else 1.0
            model.lm_head.weight.div_(getattr(made, "embedding_multiplier", root))
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()
