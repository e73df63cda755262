"""Contexts of one hash: what the factors of the hash make zero together."""

import numpy as np

from csd.kernels.table.lookup import GROUP_FACTOR, TOKEN_FACTORS

# three tokens' differences, by which their sum of products stays the same modulo 2^64
APART = np.array([-514162, 488395, -1068447])
FIRST = np.array([600000, 5, 1100000])


def same_hash(count: int, group: int = 1) -> list[tuple[int, list[int]]]:
    """`count` (group, context of three tokens): two of the group, the others of other groups."""
    found = [(group, (FIRST + i * APART).tolist()) for i in range(2)]
    for i in range(1, 99):
        # the group's factor is odd: a group makes up for any tokens
        tokens = FIRST - [i, i % 3, 0]
        z = int(((FIRST - tokens) * TOKEN_FACTORS[:3]).sum())
        other = (group + z * pow(int(GROUP_FACTOR), -1, 1 << 64)) % (1 << 64)
        if other < 1 << 63:
            found.append((other, tokens.tolist()))
    return found[:count]
