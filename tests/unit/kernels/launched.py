"""The model whose step `launches.py` launches: one layer with the heads of Llama 3.1 8B.

Its kernels are those that `test_aot.py` compiles for the large model, except for the norms and
SwiGLU, which have fewer numbers here.
"""

from dataclasses import replace

from bench.lib.kernel_shape import Shape
from bench.lib.shapes import SHAPES

CONFIG = replace(
    SHAPES["llama-3.1-8b"], layers=1, hidden=512, intermediate=1024, context=512, tied=True
)
SHAPE = Shape.of("one-layer", CONFIG)
