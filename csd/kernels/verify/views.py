"""Fields of a step's records that verification, and the two operations after it, read and write."""

from csd.state.filters import FILTERS
from csd.state.pool import Pool
from csd.state.record import View
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# sampling at every row, and the descent along the samples
POOL = View(Pool, "token parent slot depth ancestors slot_start slot_nodes")
SLOTS = View(
    Slots,
    f"live key sample generated {' '.join(FILTERS)} seen max_new min_new stop_ids ban_ids",
)
VERDICT = View(Verdict)
# the advance of the slots
ADVANCED = View(
    Slots,
    reads="repetition_penalty",
    writes="live generated context step tokens logprobs raw_logprobs seen",
)
COMMITTED = View(Verdict, "sample logprob raw_logprob accept_row accept_count finish")
# the snapshot
TREES = View(Pool, "slot_start slot_nodes depth cost source token parent")
