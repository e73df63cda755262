"""Random matrices in the blocks of GGUF's types."""

import gguf
import numpy as np
import torch

from csd.kernels.layers.quantized import Quantized
from csd.kernels.layers.quantized.formats import FORMATS

# bytes of a block at which a float16 begins
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}


def random_rows(name, N, K, seed=0):
    """Rows of a file [N, bytes of a row] of any numbers, with scales of 2^-5 to 2^-1."""
    kind = gguf.GGMLQuantizationType[name]
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (N, K // numbers, size), dtype=np.uint8)
    for at in HALVES[name]:
        blocks[..., at + 1] = blocks[..., at + 1] & 0x8F | 0x28
    return blocks.reshape(N, -1)


def dequantized(rows, name):
    """The matrix in float32, by the gguf package."""
    return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[name]))


def random_matrix(name, N, K, seed=0):
    return Quantized.of_file(random_rows(name, N, K, seed), FORMATS[name])
