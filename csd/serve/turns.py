"""Turns of owners: whose sample gets the next free slot.

While an owner's samples wait, no other owner begins a sample beyond its share of the slots. A free
slot goes to the owner with the fewest samples in flight, of several such owners to the one that has
waited longest. Which sample begins first has no effect on its tokens.
"""

from collections.abc import Hashable, Iterable, Mapping
from itertools import count


def share_of(slots: int, wanted: Iterable[int]) -> int:
    """Largest number of slots of an owner; wanted: samples in flight and waiting, of each owner.

    Slots that owners with few samples leave are divided among the others.
    """
    left, counts = slots, sorted(wanted)
    for i, samples in enumerate(counts):
        share = -(-left // (len(counts) - i))
        if samples > share:
            return max(share, 1)
        left -= samples
    return slots


class Turns:
    """Order in which owners begin samples."""

    def __init__(self) -> None:
        self._serial = count(1)
        self._last: dict[Hashable, int] = {}  # serial number of each owner's last turn

    def order(
        self, slots: int, live: Mapping[Hashable, int], waiting: Mapping[Hashable, int]
    ) -> list:
        """Owners that may begin a sample in one of `slots` slots, in turn.

        live, waiting: their numbers of samples.
        """
        owners = {*live, *waiting}
        self._last = {owner: turn for owner, turn in self._last.items() if owner in owners}
        share = share_of(slots, [live.get(o, 0) + waiting.get(o, 0) for o in owners])
        below = [owner for owner in waiting if live.get(owner, 0) < share]
        return sorted(below, key=lambda owner: (live.get(owner, 0), self._last.get(owner, 0)))

    def served(self, owner: Hashable) -> None:
        """Count a turn of an owner."""
        self._last[owner] = next(self._serial)
