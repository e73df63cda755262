"""Metadata and tensors of a GGUF file that transformers leaves out: used here, or refused by name.

The meaning of a key is llama.cpp's. Rotary frequencies w_j become w_j / (factor f_j), with the
linear factor of `rope.scaling` and the f of the tensor `rope_freqs`, which carries Llama 3.1's.
"""

import math
from typing import Any

import torch

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

# keys behind "<architecture>." that are read by transformers or here, or that change no logits
_USED = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
)  # fmt: skip
_NO_VALUE = (
    # embeddings of texts, and the layout of a file
    "pooling_type", "tensor_data_layout",
    # of yarn, which is refused by its type
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
)  # fmt: skip
# keys that must have a value with which nothing is computed
_NEUTRAL: dict[str, tuple] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "use_parallel_residual": (False,),
}
_ENDS = ("eos", "eot", "eom")
_TENSORS = ("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight")
# llama.cpp skips rotary tables of old files, too
_LAYER = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_down",
    "ffn_up", "attn_rot_embd",
)  # fmt: skip


class Facts:
    """The facts of a file. Raises ValueError naming a key or tensor that csd does not compute with.

    reader: a `gguf.GGUFReader`.
    """

    def __init__(self, name: str, reader: Any):
        self.name = name
        self.values = {key: field.contents() for key, field in reader.fields.items()}
        self.family = self.values.get("general.architecture")
        self.head_dim: int | None = None
        self.factors: torch.Tensor | float = 1.0
        # transformers has the list of the families that it reads
        if self.family in ARCHITECTURES:
            self._read(reader)

    def _read(self, reader: Any) -> None:
        if self.values.get("general.type", "model") != "model":
            self._refuse("general.type", "'model'")
        if self.values.get("split.count", 0) > 1:
            self._refuse("split.count", "0: join the parts to one file (llama-gguf-split --merge)")
        prefix = f"{self.family}."
        own = [key.removeprefix(prefix) for key in self.values if key.startswith(prefix)]
        for key in own:
            if isinstance(self._get(key), list):
                self._refuse(prefix + key, "one number for all layers")
        heads, width = self._get("attention.head_count"), self._get("embedding_length")
        if heads is None or width is None:
            raise ValueError(f"{self.name} lacks {prefix}attention.head_count or embedding_length")
        rotated = self._get("rope.dimension_count", width // heads)
        self.head_dim = self._get("attention.key_length", rotated)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._get(key, self.head_dim) != self.head_dim:
                self._refuse(prefix + key, f"{self.head_dim}, the size of a head")
        for key in own:
            self._check(key)
        self._read_rope(reader)
        blocks = self._get("block_count")
        for tensor in reader.tensors:
            self._check_tensor(tensor.name, blocks)

    def _check(self, key: str) -> None:
        value = self._get(key)
        if key in _USED or key in _NO_VALUE:
            return
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                self._refuse(f"{self.family}.{key}", " or ".join(map(str, _NEUTRAL[key])))
            return
        if key == "attention.scale":
            assert self.head_dim is not None
            if value and not math.isclose(value, self.head_dim**-0.5, rel_tol=1e-6):
                self._refuse(f"{self.family}.{key}", f"{self.head_dim**-0.5}")
            return
        if key.startswith("attention.sliding_window"):
            window = self._get("attention.sliding_window", 0)
            if 0 < window < self._get("context_length", 0):
                self._refuse(f"{self.family}.attention.sliding_window", "0, no window")
            return
        raise ValueError(
            f"{self.name} has the key {self.family}.{key} = {str(value)[:80]}, which csd does not "
            "compute with"
        )

    def _read_rope(self, reader: Any) -> None:
        kind = self._get("rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            self._refuse(f"{self.family}.rope.scaling.type", "'none' or 'linear'")
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", 0))
        self.factors = float(factor) if factor and kind == "linear" else 1.0
        for tensor in reader.tensors:
            if tensor.name == "rope_freqs.weight":
                table = torch.tensor(tensor.data, dtype=torch.float32).flatten()
                assert self.head_dim is not None
                if table.numel() != self.head_dim // 2:
                    raise ValueError(
                        f"{self.name}: the tensor rope_freqs.weight must have {self.head_dim // 2} "
                        f"values, got {table.numel()}"
                    )
                self.factors = self.factors * table

    def _check_tensor(self, name: str, blocks: int) -> None:
        if name in _TENSORS:
            return
        layer = name.split(".")
        if len(layer) == 4 and layer[0] == "blk" and int(layer[1]) < blocks:
            known = _LAYER + (("attn_q_norm", "attn_k_norm") if self.family == "qwen3" else ())
            if layer[3] == "weight" and layer[2] in known:
                return
            biased = ("attn_q", "attn_k", "attn_v") if self.family == "qwen2" else ()
            if layer[3] == "bias" and layer[2] in biased:
                return
        raise ValueError(
            f"{self.name} has the tensor {name}, which csd does not compute with for {self.family}"
        )

    def _get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.family}.{key}", default)

    def _refuse(self, key: str, expected: str) -> None:
        raise ValueError(f"{self.name}: {key} must be {expected}, got {self.values[key]!r}")

    def to_config(self, config: Any) -> None:
        """Write the size of a head, which transformers takes from elsewhere."""
        if self.head_dim is not None:
            config.head_dim = self.head_dim

    def to_model(self, model: Any) -> None:
        """Write rotary frequencies, and the tokens that end a text, a turn and a message."""
        if self.family not in ARCHITECTURES:
            return
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq / self.factors
        ends = model.generation_config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        named = (self.values.get(f"tokenizer.ggml.{end}_token_id") for end in _ENDS)
        ends = list(dict.fromkeys([*ends, *(end for end in named if end is not None)]))
        if ends:
            model.generation_config.eos_token_id = ends
