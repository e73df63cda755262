"""Facts of published config.json files, by the name of a checkpoint: what its layers compute with.

The vocabulary and the number of layers are of `build`, so that a random model of the shape fits; of
experts there are fewer, and windows of narrow models are short, so that they hide tokens. Names of
files, tokens and training are left out.
"""

from ast import literal_eval
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


# in the order of COLUMNS; `MORE` has the other fields
COLUMNS = "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads"
COLUMNS += " rms_norm_eps max_position_embeddings tie_word_embeddings"
TABLE = """
Llama-3.2-1B        llama         2048  8192    32  8 1e-05  131072  True
Mistral-7B-v0.3     mistral       4096 14336    32  8 1e-05   32768 False
Qwen2.5-0.5B        qwen2          896  4864    14  2 1e-06   32768  True
Qwen3-0.6B          qwen3         1024  3072    16  8 1e-06   40960  True
Qwen3-30B-A3B       qwen3_moe     2048  6144    32  4 1e-06   40960 False
SmolLM3-3B          smollm3       2048 11008    16  4 1e-06   65536  True
granite-3.3-2b-base granite       2048  8192    32  8 1e-05  131072  True
phi-4               phi3          5120 17920    40 10 1e-05   16384 False
OLMo-2-0425-1B      olmo2         2048  8192    16 16 1e-06    4096 False
Mistral-7B-v0.1     mistral       4096 14336    32  8 1e-05   32768 False
Phi-3-mini-4k       phi3          3072  8192    32 32 1e-05    4096 False
Phi-4-mini          phi3          3072  8192    24  8 1e-05  131072  True
Olmo-3-7B           olmo3         4096 11008    32 32 1e-06   65536 False
gemma-2-2b          gemma2        2304  9216     8  4 1e-06    8192  True
gemma-3-1b          gemma3_text   1152  6912     4  1 1e-06   32768  True
gemma-3-12b         gemma3_text   3840 15360    16  8 1e-06  131072  True
"""
MORE: dict[str, dict] = {
    "Llama-3.2-1B": dict(head_dim=64, rope_parameters=LLAMA3),
    "Mistral-7B-v0.3": dict(rope_parameters=rope(1000000.0), sliding_window=None),
    "Qwen2.5-0.5B": dict(
        rope_parameters=rope(1000000.0),
        use_sliding_window=False,
        sliding_window=32768,
        max_window_layers=24,
    ),
    "Qwen3-0.6B": dict(
        head_dim=128,
        rope_parameters=rope(1000000.0),
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=28,
        attention_bias=False,
    ),
    "Qwen3-30B-A3B": dict(
        head_dim=128,
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
    ),
    "SmolLM3-3B": dict(
        rope_parameters=rope(5000000.0),
        no_rope_layers=[1, 0],
        no_rope_layer_interval=4,
        pretraining_tp=2,
        use_sliding_window=False,
        sliding_window=None,
        attention_bias=False,
        mlp_bias=False,
    ),
    "granite-3.3-2b-base": dict(
        rope_parameters=rope(10000000.0),
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        attention_bias=False,
        mlp_bias=False,
    ),
    "phi-4": dict(
        original_max_position_embeddings=16384, rope_parameters=rope(250000.0), sliding_window=None
    ),
    "OLMo-2-0425-1B": dict(rope_parameters=rope(500000.0), attention_bias=False),
    "Mistral-7B-v0.1": dict(rope_parameters=rope(10000.0), sliding_window=4096),
    "Phi-3-mini-4k": dict(
        original_max_position_embeddings=4096,
        rope_parameters=rope(10000.0),
        sliding_window=2047,
        attention_bias=False,
    ),
    "Phi-4-mini": dict(
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
    ),
    "Olmo-3-7B": dict(
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
    ),
    "gemma-2-2b": dict(
        head_dim=256,
        rope_parameters=rope(10000.0),
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        attention_bias=False,
        cache_implementation="hybrid",
    ),
    "gemma-3-1b": dict(
        head_dim=256,
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
    ),
    "gemma-3-12b": dict(
        head_dim=256,
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
    ),
}


def _facts(row: str) -> tuple[str, dict]:
    name, kind, *numbers = row.split()
    values = [kind, *map(literal_eval, numbers)]
    return name, dict(zip(COLUMNS.split(), values, strict=True)) | MORE[name]


PUBLISHED: dict[str, dict] = dict(map(_facts, TABLE.strip().splitlines()))
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
