"""Pauses of the garbage collector end with the last of them, and restore what was before."""

import gc
import os

import numpy as np
import pytest
from numba.core import event

from csd.kernels.numba.jit import loop
from csd.utils.collector import pause, paused, resume

pytestmark = pytest.mark.quick


def test_the_collector_runs_again_after_the_last_pause():
    assert gc.isenabled()
    with pytest.raises(KeyError), paused():
        assert not gc.isenabled()
        pause()
        resume()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_forked_child_collects():
    """Nothing in it would end the pause of a thread of its parent."""
    with paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_collection_while_a_loop_is_compiled():
    running = []

    class Listener(event.Listener):
        def on_start(self, data):
            running.append(gc.isenabled())

        def on_end(self, data):
            pass

    def doubled(x):
        return 2 * x

    # only loops of csd count
    doubled.__module__ = "csd.doubled"
    with event.install_listener("numba:compile", Listener()):
        assert loop(doubled)(np.float64(2)) == 4
    assert running == [False] and gc.isenabled()
