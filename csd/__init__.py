"""csd: faster multi-sample LLM inference that changes nothing about what is sampled."""

from csd.best import best_of
from csd.engine import Engine
from csd.generate import generate, stream
from csd.integrations.attention import register_attention, register_when_imported
from csd.integrations.hf import hf_generate
from csd.integrations.swap import apply_kernels
from csd.integrations.tree import Tree
from csd.integrations.tree_cache import TreeCache
from csd.kept_engines import release
from csd.metrics import pass_at_k
from csd.result import Sample, Samples, Stats
from csd.vote import Vote, vote

__all__ = [
    "Engine",
    "Sample",
    "Samples",
    "Stats",
    "Tree",
    "TreeCache",
    "Vote",
    "apply_kernels",
    "best_of",
    "generate",
    "hf_generate",
    "pass_at_k",
    "register_attention",
    "release",
    "stream",
    "vote",
]
__version__ = "0.1.0"

register_when_imported()
