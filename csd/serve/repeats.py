"""Notice of requests that repeat a prompt with its seed, and so get the samples that it had.

A client that sends one request per answer, all with one seed, gets equal answers.
"""

import logging
from collections import OrderedDict

LOG = logging.getLogger("csd")
# most requests that are remembered
MOST = 4096


class Repeats:
    """The last requests by noise key, which is a function of prompt and seed, and first sample."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._logged = False

    def note(self, key: int, first_sample: int) -> None:
        """Remember a request; logs the first repetition of this object's life."""
        if self._logged:
            return
        request = key, first_sample
        if request in self._seen:
            self._logged = True
            self._seen.clear()
            LOG.warning(
                "a prompt came again with the same seed, so the request gets the same samples as "
                "before: for other ones set n, leave the seed out, or send seed=-1"
            )
            return
        self._seen[request] = None
        if len(self._seen) > MOST:
            self._seen.popitem(last=False)
