"""Constants and views that the reference and the kernels of a draft share."""

import math
from collections.abc import Callable

import numpy as np
import torch

from csd.state.context_table import USUAL_HALVES, GraphConfig, Table
from csd.state.pool import COST_ONE, MAX_PROGRESS_PENALTY, Pool
from csd.state.record import View
from csd.state.slots import Slots

# probabilities are multiples of 1 / ONE
ONE = 1 << 24
# mean of a Gumbel variable: the noise of the mass outside a context's successors
EULER_GAMMA = 0.5772156649015329
# lower bound of that mass
TAIL = 1e-3
# most successors of a context of the prior
MAX_PRIOR_SUCCESSORS = 16
# levels that every slot's tree grows before all slots' lists are cut
FIRST_LEVELS = 4
# largest cost with the progress penalty; largest cost of a path; cost of probability 1 / e
MAX_COST = (1 << 22) - 1
MAX_PATH_COST = MAX_COST - MAX_PROGRESS_PENALTY
UNIT = COST_ONE / math.log(2)
# right shift from multiples of 2^-32, in the paper's layers, to multiples of 1 / ONE
LAYER_SHIFT = 8

SLOTS = View(
    Slots,
    "live group key sample generated max_new temperature context stop_ids step progress_penalty "
    "prompt_len group_key prior_part",
)
TABLE, POOL = View(Table), View(Pool)

# (slot [F], position [F], token [F, W]) -> g [F, W] float64, in place of the slots' keyed noise
DraftNoise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def level_cost(config: GraphConfig, generated: np.ndarray, step: np.ndarray) -> np.ndarray:
    """[S] int64: cost of a level for slots that have `generated` tokens after `step` steps."""
    usual = np.full(generated.shape, config.level_cost, np.int64)
    if not config.settle:
        return usual
    steps = USUAL_HALVES * (step.astype(np.int64) + config.settle)
    tokens = 2 * generated.astype(np.int64) + USUAL_HALVES * config.settle
    return (usual * steps // tokens).clip(usual // 4, 3 * usual // 2)


def max_path_cost(config: GraphConfig) -> int:
    """Largest cost of a path that is drafted."""
    if config.min_prob <= 0:
        return MAX_PATH_COST
    return min(MAX_PATH_COST, round(-math.log(config.min_prob) * UNIT))
