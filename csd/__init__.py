"""csd: faster multi-sample LLM inference that changes nothing about what is sampled."""

from typing import TYPE_CHECKING, Any

from csd import research

# names that csd.research registers stand in the options of the modules below
# isort: split
from csd import integrations, kernels
from csd.engine.engine import Engine
from csd.engine.generate import generate, release, stream
from csd.engine.results.result import Sample, Samples
from csd.engine.results.stats import Stats
from csd.engine.results.views import use_page
from csd.evaluate.best_of import best_of
from csd.evaluate.pass_at_k import pass_at_k
from csd.evaluate.report import page_of
from csd.evaluate.score import score
from csd.evaluate.vote import Vote, vote
from csd.graph.prior import Prior
from csd.integrations.transformers.attention import register_attention, register_when_imported
from csd.integrations.transformers.generate import hf_generate
from csd.integrations.transformers.packed_tree import PackedTree
from csd.integrations.transformers.swap import apply_kernels, remove_kernels
from csd.integrations.transformers.tree import Tree
from csd.integrations.transformers.tree_cache import TreeCache
from csd.models.load import gguf_module
from csd.serve import AsyncEngine, QueueFull
from csd.traces.history import History
from csd.utils.lazy import warn_of_namesake
from csd.utils.version import __version__

if TYPE_CHECKING:
    from csd.gradient.logprobs import Logprobs, logprobs
    from csd.research import baselines, verify
    from csd.research.draft_models.draft_model import DraftModel
    from csd.research.draft_models.eagle import Eagle
    from csd.research.training.train_head import train_head

__all__ = [
    "AsyncEngine",
    "DraftModel",
    "Eagle",
    "Engine",
    "History",
    "Logprobs",
    "PackedTree",
    "Prior",
    "QueueFull",
    "Sample",
    "Samples",
    "Stats",
    "Tree",
    "TreeCache",
    "Vote",
    "__version__",
    "apply_kernels",
    "baselines",
    "best_of",
    "generate",
    "gguf_module",
    "hf_generate",
    "integrations",
    "kernels",
    "logprobs",
    "pass_at_k",
    "register_attention",
    "release",
    "remove_kernels",
    "score",
    "stream",
    "train_head",
    "verify",
    "vote",
]


def __dir__() -> list[str]:
    """Names for users; modules and functions that this file needs are left out."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """The names that few callers need, imported at the first access."""
    if name in ("Logprobs", "logprobs"):
        from csd.gradient import logprobs as gradient

        return getattr(gradient, name)
    if name in research.__all__:
        return getattr(research, name)
    raise AttributeError(f"module 'csd' has no attribute {name!r}")


register_when_imported()
warn_of_namesake()
use_page(page_of)
