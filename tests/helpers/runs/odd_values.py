"""Values of every kind that a user or a program may pass for an argument."""

import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import torch

import csd

NUMBERS = [
    0,
    1,
    -1,
    3,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**63,
    2**64,
    -(2**31),
    -(2**63),
    10**30,
    10**5000,
    -(10**400),
    0.0,
    -0.0,
    0.5,
    1.0,
    -1.0,
    5e-324,
    1e-300,
    1e300,
    math.inf,
    -math.inf,
    math.nan,
    np.int64(3),
    np.int8(-1),
    np.uint64(2**64 - 1),
    np.float32(0.5),
    np.float64("nan"),
    np.float16("inf"),
    Fraction(1, 2),
    Fraction(10**400),
    Decimal("0.5"),
    1j,
]
FLAGS = [True, False, np.bool_(True)]
TEXTS = ["", "no", "auto", "0.5", "1", "\ud800", b"", b"ab", bytearray(b"a")]
ARRAYS = [
    np.array(1),
    np.array([1, 2]),
    np.array(["a"]),
    np.array([]),
    torch.tensor(1),
    torch.tensor([1, 2]),
    torch.tensor(True),
    torch.tensor([0.5]),
    torch.zeros(0, 3).long(),
]
LISTS = [
    [],
    [None],
    [1],
    [True],
    [1.5],
    ["a"],
    [""],
    [[1]],
    [10**30],
    [-1],
    ["a"] * 99,
    (),
    (1, 2),
    {},
    {"a": 1},
    {1: 2},
    {1, 2},
    frozenset("a"),
    range(3),
    range(10**12),
]
OTHERS = [
    None,
    int,
    str,
    bytes,
    len,
    object,
    object(),
    ...,
    NotImplemented,
    iter([1]),
    csd.Vote,
    csd.DraftModel,
    csd.History,
    lambda: 1,
    Exception("x"),
    torch.float32,
    torch.device("meta"),
    SimpleNamespace(),
]
ODD = [*NUMBERS, *FLAGS, *TEXTS, *ARRAYS, *LISTS, *OTHERS]


def shown(value):
    try:
        return f"{type(value).__name__} {value!r:.60}"
    except (ValueError, TypeError):
        return type(value).__name__
