"""In which order prompts are admitted: those whose samples were longest before come first.

A call ends with its last sample, so a long one should not begin last. How long samples were is all
that is known before they are drawn; results do not depend on the order.
"""

from collections.abc import Sequence

from csd.engine.requests import Request


def longest_first(requests: Sequence[Request]) -> list[Request]:
    """By the mean length of their earlier samples; prompts without any count as the average one."""
    known = {
        id(r): sum(map(len, r.history)) / len(r.history) for r in requests if r.history
    }
    if not known:
        return list(requests)
    average = sum(known.values()) / len(known)
    return sorted(requests, key=lambda r: -known.get(id(r), average))
