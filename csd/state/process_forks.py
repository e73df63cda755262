"""Locks after a fork: a child has only the forking thread, so other threads' locks stay held."""

import os
import weakref
from typing import Protocol

import torch


class Forked(Protocol):
    """An object with locks, of which a child gets a copy."""

    def after_fork(self) -> None:
        """Replace locks in the child that other threads may have held."""


_objects: "weakref.WeakSet[Forked]" = weakref.WeakSet()


def watch_forks(x: Forked) -> None:
    """Call `x.after_fork` in each child that is forked while `x` lives."""
    _objects.add(x)


def _in_child() -> None:
    objects = list(_objects)
    if objects:
        # GNU's OpenMP waits in a child for threads of the parent
        torch.set_num_threads(1)
    for x in objects:
        x.after_fork()


os.register_at_fork(after_in_child=_in_child)
