"""Check of a GPU's kernels before the first sample: once per machine and version, then cached.

`csd doctor` runs in a separate process, so that the caller survives a kernel that faults.
"""

import json
import logging
import subprocess
from contextlib import AbstractContextManager, nullcontext

import torch

from csd.models.fused.config import ModelSizes
from csd.utils import isolated_python
from csd.utils.cache_folder import alone, path_of, read, save
from csd.utils.device import BUSY
from csd.utils.phases import phase
from csd.utils.version import __version__

SECONDS = 600
LOG = logging.getLogger("csd")


def require_check(
    device: torch.device, dtype: torch.dtype, config: ModelSizes, exact: bool = False
) -> None:
    """Check the kernels; raises RuntimeError, naming the operation, if one is wrong on `device`.

    Success is cached in $XDG_CACHE_HOME/csd, by device, versions, dtype, head sizes, vocabulary
    and `exact`. A device in exclusive use by this process is not checked; a warning is logged.
    """
    import triton

    sizes = dict(
        heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, vocab=config.vocab
    )
    name = str(dtype).removeprefix("torch.")
    checked = {
        "csd": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name(device),
        "dtype": name,
        "exact": exact,
        **sizes,
    }
    key = json.dumps(checked, sort_keys=True)
    if _cached(key) == key:
        return
    with _alone(key):
        # another process, such as a rank of the same job, may have checked meanwhile
        if _cached(key) != key:
            _check(key, device, name, sizes, exact, checked["device"])


def _check(
    key: str, device: torch.device, dtype: str, sizes: dict[str, int], exact: bool, gpu: str
) -> None:
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in sizes.items()]
    flags += ["--json", "--kernels=triton", f"--device={device}", f"--dtype={dtype}"]
    flags += ["--exact"] * exact
    command = isolated_python.command("csd.cli.main", ["doctor", *flags])
    announced = f"checking the kernels on {gpu} in {dtype}, once per machine and version"
    with phase("checking the kernels", device, announced):
        error = _error_of(command)
    if error and BUSY in error:
        LOG.warning(
            "the kernels are not checked, because this process has exclusive use of the GPU: %s",
            error,
        )
        return
    if error:
        raise RuntimeError(
            f"csd's check of its kernels on {gpu} failed: {error}. No sample was drawn. "
            "Engine(..., kernels='reference') runs without Triton, self_check=False skips the "
            "check; please report the output of `csd doctor`"
        )
    try:
        save(path_of("check", key), key)
    # a user may have no home
    except (OSError, RuntimeError) as error:
        # the next process checks again
        LOG.warning("the result of the kernel check cannot be cached: %s", error)


def _alone(key: str) -> AbstractContextManager[None]:
    try:
        return alone(path_of("check", key))
    # a user may have no home
    except RuntimeError:
        return nullcontext()


def _cached(key: str) -> str | None:
    try:
        return read(path_of("check", key)).decode()
    except (OSError, RuntimeError, ValueError):
        return None


def _error_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            env=isolated_python.environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"it did not finish within {SECONDS} s"
    except OSError as error:
        return f"no process can be started: {error}"
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return f"the process exited with code {done.returncode}: {last[0]}"
    wrong = [c for r in result["reports"] for c in r["checks"] if c["error"] or not c["calls"]]
    return "; ".join(f"{c['name']}: {c['error'] or 'it was not called'}" for c in wrong) or None
