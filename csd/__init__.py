"""csd: faster multi-sample LLM inference that changes nothing about what is sampled."""

from csd.engine import Engine
from csd.generate import generate, release, stream
from csd.integrations.hf import hf_generate
from csd.result import Sample, Samples, Stats
from csd.vote import vote

__all__ = [
    "Engine",
    "Sample",
    "Samples",
    "Stats",
    "generate",
    "hf_generate",
    "release",
    "stream",
    "vote",
]
__version__ = "0.1.0"
