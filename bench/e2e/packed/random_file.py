"""A GGUF file with the shape of Qwen2.5-7B, of random blocks in the types of Q4_K_M.

    python -m bench.e2e.packed.random_file TO [FROM]

Speed and memory depend on shapes and types alone, so that `bench packed TO` shows those of a model
that cannot be had. Metadata and tokenizer are those of FROM, a smaller Qwen2.5 (by default
`python -m bench models coder-1.5b`). TO has 4.7 GB.
"""

import sys

import gguf
import numpy as np

from bench.lib.models import path_of

HIDDEN, LAYERS, INNER, HEADS, KV_HEADS, HEAD_DIM = 3584, 28, 18944, 28, 4, 128
SHAPE = {
    "block_count": LAYERS,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
}
Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
# of a block: the byte at which its float16 factors begin, and these, for weights near 1 / sqrt(K)
FACTORS = {Q4_K: (0, (1 / 160, 1 / 21.3)), Q6_K: (208, (1 / 1332,))}


def main(to: str, source: str = "coder-1.5b") -> None:
    writer = gguf.GGUFWriter(to, "qwen2")
    vocabulary = _copy_metadata(gguf.GGUFReader(path_of(source)), writer)
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> None:
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (rows, columns // per_block, size), dtype=np.uint8)
        at, factors = FACTORS[kind]
        value = np.array(factors, np.float16) / np.float16(columns**0.5)
        blocks[..., at : at + value.nbytes] = value.view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=kind)

    def vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("token_embd", vocabulary, HIDDEN, Q4_K)
    matrix("output", vocabulary, HIDDEN, Q6_K)
    vector("output_norm.weight", HIDDEN, 1.0)
    for i in range(LAYERS):
        # Q4_K_M has more bits in the first and last eighth of the layers, and in each third one
        more = i < LAYERS // 8 or i >= 7 * LAYERS // 8 or (i - LAYERS // 8) % 3 == 2
        for name in ("attn_norm", "ffn_norm"):
            vector(f"blk.{i}.{name}.weight", HIDDEN, 1.0)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            kind = Q6_K if more and name == "v" else Q4_K
            matrix(f"blk.{i}.attn_{name}", heads * HEAD_DIM, HIDDEN, kind)
            vector(f"blk.{i}.attn_{name}.bias", heads * HEAD_DIM, 0.0)
        matrix(f"blk.{i}.attn_output", HIDDEN, HEADS * HEAD_DIM, Q4_K)
        matrix(f"blk.{i}.ffn_gate", INNER, HIDDEN, Q4_K)
        matrix(f"blk.{i}.ffn_up", INNER, HIDDEN, Q4_K)
        matrix(f"blk.{i}.ffn_down", HIDDEN, INNER, Q6_K if more else Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_metadata(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    """Writes the fields of `source` with the shape's own values; returns the vocabulary's size."""
    shape = {f"qwen2.{name}": value for name, value in SHAPE.items()}
    for name, field in source.fields.items():
        # the writer has its own of these
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = shape.get(name, field.contents())
            of_items = {"sub_type": field.types[-1]} if len(field.types) > 1 else {}
            writer.add_key_value(name, value, field.types[0], **of_items)
    return len(source.fields["tokenizer.ggml.tokens"].contents())


if __name__ == "__main__":
    main(*sys.argv[1:])
