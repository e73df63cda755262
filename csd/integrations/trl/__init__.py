"""csd inside TRL.

rollout.py  rollouts: `GRPOTrainer(..., rollout_func=csd.integrations.trl.Rollout())`
trainer.py  a GRPOTrainer with the sampler's log-probabilities; imports TRL at the first access
early.py    groups that end early, and batch.py their batches
"""

from typing import TYPE_CHECKING, Any

from csd.integrations.trl.rollout import Rollout
from csd.utils.lazy import check_installed

if TYPE_CHECKING:
    from csd.integrations.trl.trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "Rollout"]


def __getattr__(name: str) -> Any:
    if name != "GRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_installed("trl", "trl", "csd.integrations.trl.GRPOTrainer")
    from csd.integrations.trl.trainer import GRPOTrainer

    return GRPOTrainer
