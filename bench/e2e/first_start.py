"""CPU seconds of a machine's first call and of a first `csd serve`, and the loops that compile.

    python -m bench first_start [--against REVISION] [--rounds 2] [--threads 2] [--json FILE]

Each run is a process with empty caches: a call of 8 samples of 40 tokens of SmolLM2-135M, or a
server until it accepts requests. Seconds are of CPU time, of the process and those that it starts,
so other work on the machine changes them little. `--against` runs another revision of csd in turn.
The loops are those of a further call in one thread: seconds of a loop that Python calls include the
loops within it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.lib.common import finish, table
from csd.models.demo import smollm2_path

ROOT = Path(__file__).parents[2]
RESULT = Path("bench/results/first_start.json")
CALL = """
import csd
csd.generate({path!r}, [{{"role": "user", "content": "In which year did World War II end?"}}],
             num_samples=8, max_new_tokens=40, temperature=0.7, seed=0, progress=False)
"""
SERVE = (
    'import sys; from csd.cli.main import main; sys.exit(main(["serve", {path!r}, "--port", "0"]))'
)
LOOPS = """
import json, time
from numba.core import event
rows, within = [], []
class Timed(event.Listener):
    def on_start(self, data):
        within.append(time.process_time())
    def on_end(self, data):
        seconds, loop = time.process_time() - within.pop(), data.data["dispatcher"].py_func
        if loop.__module__.startswith("csd."):
            rows.append((f"{{loop.__module__}}.{{loop.__name__}}", seconds, not within))
event.register("numba:compile", Timed())
"""
SHOW = "print(json.dumps(rows))\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="REVISION", help="a commit to run in turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    with checkouts(args.against) as trees:
        seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            for work, code in (("call", CALL), ("serve", SERVE)):
                for revision, tree in trees.items():
                    used = first(tree, code, args.threads)[:2]
                    seconds.setdefault((work, revision), []).append(used)
                    print(f"{work} {revision}: {used[0]:.1f} s of CPU time", flush=True)
    rows = []
    for (work, revision), used in seconds.items():
        each, peak = [x for x, _ in used], max(x for _, x in used)
        rounds = zip((x for x, _ in seconds[work, "this"]), each, strict=True)
        rows.append(
            {
                "work": work,
                "revision": revision,
                "CPU seconds": round(median(each), 1),
                "range": f"{min(each):.1f} to {max(each):.1f}",
                "GB": round(peak, 2),
                "this / revision": round(median(a / b for a, b in rounds), 2),
            }
        )
    print(table(rows))
    loops = loops_of(first(ROOT, LOOPS + CALL + SHOW, 1)[2])
    print(table(loops))
    result = {"bench": "first_start", "against": args.against, "threads": args.threads}
    finish(result | {"rows": rows, "loops": loops}, args.json)


@contextmanager
def checkouts(against: str | None) -> Iterator[dict[str, Path]]:
    """Folders of csd by name of the revision: this one, and a checkout of `against`."""
    trees = {"this": ROOT}
    with tempfile.TemporaryDirectory() as folder:
        if against is not None:
            files = subprocess.run(
                ["git", "archive", against, "csd"], cwd=ROOT, stdout=subprocess.PIPE, check=True
            )
            subprocess.run(["tar", "-x", "-C", folder], input=files.stdout, check=True)
            trees[against] = Path(folder)
        yield trees


def first(tree: Path, code: str, threads: int) -> tuple[float, float, str]:
    """Run `code` with empty caches; returns CPU seconds, peak memory in GB, and the output."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("loops", "cache"):
            Path(folder, name).mkdir()
        environment = os.environ | {
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": str(threads),
            "NUMBA_CACHE_DIR": f"{folder}/loops",
            "XDG_CACHE_HOME": f"{folder}/cache",
            "PYTHONUNBUFFERED": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", code.format(path=str(smollm2_path()))],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if " at http://" in line:
                process.send_signal(signal.SIGTERM)
        # includes the processes that it started and waited for
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    # a server ends by the signal that it was sent
    if process.returncode not in (0, -signal.SIGTERM):
        raise RuntimeError(f"exit code {process.returncode}: {''.join(lines[-20:])}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, "".join(lines)


def loops_of(output: str) -> list[dict]:
    """A row for each loop: how often it compiled, for Python and within others, and its seconds."""
    by_loop: dict[str, list[tuple[float, bool]]] = {}
    for name, seconds, outermost in json.loads(output.splitlines()[-1]):
        by_loop.setdefault(name, []).append((seconds, outermost))
    rows = [
        {
            "loop": name.removeprefix("csd.kernels."),
            "by Python": sum(outermost for _, outermost in each),
            "within loops": sum(not outermost for _, outermost in each),
            "seconds": round(sum(s for s, outermost in each if outermost), 2),
        }
        for name, each in by_loop.items()
    ]
    return sorted((r for r in rows if r["by Python"]), key=lambda r: -r["seconds"])


if __name__ == "__main__":
    main()
