"""Parallel compilation of a step's kernels, once per machine, model and version.

Triton compiles each kernel at its first launch, one by one. Instead, forked children of this
process run the step on tensors without memory, record the compilations that its launches need, and
each compile a share. The binaries are in Triton's cache on disk, where this process's launches find
them; a kernel that no child has compiled is compiled at its launch.
"""

import gc
import json
import logging
import os
import selectors
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton import knobs
from triton.runtime import driver

from csd.engine.step.static_step import StaticStep, sizes_for
from csd.kernels.common.compile_jobs import CompileJob, CompileTarget, recording
from csd.kernels.common.gpu import chip_of
from csd.models.fused.decoder import Decoder
from csd.utils.cache_folder import alone, holds, path_of, save
from csd.utils.phases import note, phase
from csd.utils.version import __version__

LOG = logging.getLogger("csd")
# most children; each needs about 100 MB in addition to the memory shared with this process
MOST = 16
# time limit, after which the children are killed
SECONDS = 300.0


def compile_kernels(step: StaticStep, exact: bool) -> None:
    """Compile the kernels of a GPU's step, unless that was done on this machine before.

    exact: whether rows have the same bits in every pool, which needs other kernels.
    """
    device = step.slots.live.device
    if device.type != "cuda" or knobs.runtime.interpret:
        return
    current = driver.active.get_current_target()
    target = CompileTarget(current.backend, current.arch, current.warp_size, chip_of(device))
    versions = __version__, torch.__version__, triton.__version__, knobs.cache.dir
    config = step.decoder.config
    sizes = target, step.cache.dtype, config, exact, type(step.drafter).__name__
    key = json.dumps([*map(str, versions + sizes)])
    try:
        path = path_of("kernels", key)
    # a user may have no home
    except RuntimeError:
        return
    if holds(path, key):
        return
    with alone(path):
        # another process, such as a rank of the same job, may have done it meanwhile
        if holds(path, key):
            return
        announced = f"compiling kernels for {target.chip.name}, once per machine and version"
        with phase("compiling kernels", device, announced, kind="compile"):
            complete = compile_in_children(step, target, len(os.sched_getaffinity(0)))
        if complete:
            with suppress(OSError):
                save(path, key)


def compile_in_children(step: StaticStep, target: CompileTarget, processes: int) -> bool:
    """Compile the step's kernels in up to `processes` processes; True if all are compiled."""
    parts = min(processes, MOST)
    reader, writer = os.pipe()
    children: list[int] = []
    try:
        try:
            with warnings.catch_warnings():
                # it warns of this process's other threads, but a child takes none of their locks
                warnings.simplefilter("ignore", DeprecationWarning)
                for part in range(parts):
                    child = os.fork()
                    if child == 0:
                        _compile_share(step, target, part, parts, writer)
                    children.append(child)
        except OSError as error:
            LOG.warning("fewer processes than planned compile kernels: %s", error)
        finally:
            os.close(writer)
        return _watched(reader)
    finally:
        os.close(reader)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _watched(reader: int) -> bool:
    """Read the children's reports until all have ended; True if every job was compiled."""
    done, jobs, rest, errors = 0, 1, b"", set()
    late = time.monotonic() + SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while selector.select(max(late - time.monotonic(), 0)):
            read = os.read(reader, 4096)
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            for line in map(json.loads, lines):
                if "error" in line:
                    errors.add(line["error"])
                else:
                    done, jobs = done + 1, line["jobs"]
                    note(f"{done} of {jobs}")
    for error in sorted(errors):
        LOG.warning("the kernels were not compiled in advance: %s", error)
    return done == jobs


def _compile_share(
    step: StaticStep, target: CompileTarget, part: int, parts: int, writer: int
) -> NoReturn:
    """Compile every `parts`-th job from job `part` on, and end this process."""

    def report(**line: Any) -> None:
        # writes of at most 4096 bytes to a pipe are atomic
        os.write(writer, json.dumps(line).encode()[:2000] + b"\n")

    # a graph that the collector freed would call CUDA, which a forked process cannot use
    gc.disable()
    try:
        jobs = jobs_of(step, target)
        for job in jobs[part::parts]:
            triton.compile(job.source, target=target.gpu, options=job.options)
            report(jobs=len(jobs))
    except BaseException as error:
        report(error=f"{type(error).__name__}: {error}"[:500])
    finally:
        os._exit(0)


def jobs_of(step: StaticStep, target: CompileTarget) -> list[CompileJob]:
    """Returns the compilation jobs of a step's launches, without duplicates.

    The step cannot be used afterwards: its decoder loses the layers that repeat earlier ones.
    """
    # CUDA need not be initialised: tensors of a GPU are neither made nor read
    torch.cuda._lazy_init = lambda: None
    if isinstance(step.decoder, Decoder):
        step.decoder.layers = step.decoder.layers[: step.decoder.config.unlike_layers]
    with recording(target) as jobs, WithoutMemory():
        for rows in sizes_for(step.slots.count):
            for nodes in (0, rows):
                step.body(rows, nodes)
    return list({job.key: job for job in jobs}.values())


class WithoutMemory(TorchDispatchMode):
    """Mode in which operations compute shapes only, on tensors without memory (meta tensors)."""

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, _without_memory, (args, kwargs or {}))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    if x.is_meta:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
