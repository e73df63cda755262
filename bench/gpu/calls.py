"""The two calls of a GPU that is lent for a quarter of an hour, with its starts.

Half of that time starts machines and moves files, so a call has few sections, each with a box, and
at most `SECONDS`. A call begins with what failed in an earlier one or was not reached there, and
leaves out what is done.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from bench.gpu.plan import Step

# sections that run side by side, and the seconds of their box, in the order of their value
CALLS: dict[int, tuple[tuple[tuple[str, ...], int], ...]] = {
    1: (
        (("doctor", "compile", "parity"), 95),
        (("end_to_end",), 120),
        (("attention",), 30),
        (("continuous",), 45),
        (("products",), 25),
    ),
    2: (
        (("doctor", "compile"), 60),
        (("equality",), 50),
        (("end_to_end",), 70),
        (("first_call",), 30),
        (("prefill",), 20),
    ),
}
SECONDS = {1: 315, 2: 230}
# share of its box below which a step is left out
LEAST = 0.5
# sections without which, complete, other sections' figures count for nothing
PROOFS = ("doctor", "parity")
# seconds between two looks for new results
LOOK = 0.1


def plan(call: int, earlier: dict[str, dict], only: list[str] | None = None) -> list[Step]:
    """Steps of a call, of which the last ones run if those before them leave time.

    earlier: contents of `Gathered.into` of earlier calls, {} without any.
    """
    ranked: list[tuple[int, int, int, list[str]]] = []
    for number in sorted(CALLS):
        if number > call or (number < call and not earlier):
            continue
        for together, box in CALLS[number]:
            ended = {name: earlier.get(f"{number}/{name}", {}).get("status") for name in together}
            names = [n for n, s in ended.items() if s != "done" and (not only or n in only)]
            if names:
                rank = min(_rank(name, ended[name]) for name in names)
                ranked.append((rank, number, box, names))
    steps, closes = [], 0
    for _, number, box, names in sorted(ranked, key=lambda x: x[0]):
        closes = min(closes + box, SECONDS[call])
        steps.append(Step(names, closes, number, LEAST * box))
    return steps


def _rank(name: str, ended: str | None) -> int:
    """0 to 2, in the order of a call; ended: how the section ended in an earlier call."""
    if ended == "failed" or (ended == "cut" and name in PROOFS):
        return 0
    # a section that was cut has rows
    return 2 if ended == "cut" else 1


class Gathered:
    """One file of all results of a run, "CALL/SECTION" or "SECTION" -> contents of that file.

    earlier: results that the file begins with.
    """

    def __init__(self, folder: Path, into: Path, earlier: dict[str, dict]):
        self.folder, self.into, self.results = folder, into, dict(earlier)
        # an earlier run's files in the folder are not of this run
        self._read = dict(self._stamps())
        self._write()

    def _stamps(self) -> Iterator[tuple[Path, tuple]]:
        for pattern in ("*.json", "[0-9]/*.json"):
            for path in self.folder.glob(pattern):
                try:
                    status = path.stat()
                except OSError:
                    # a section that begins removes its file
                    continue
                if path != self.into:
                    yield path, (status.st_ino, status.st_mtime_ns, status.st_size)

    def update(self) -> None:
        """Read what is new, and replace the file if anything is."""
        changed = False
        for path, stamp in self._stamps():
            if self._read.get(path) == stamp:
                continue
            try:
                contents = json.loads(path.read_text())
            except (OSError, ValueError):
                # it is being written
                continue
            self._read[path], changed = stamp, True
            self.results[path.relative_to(self.folder).with_suffix("").as_posix()] = contents
        if changed:
            self._write()

    def _write(self) -> None:
        fresh = self.into.with_name(f"{self.into.name}.part")
        fresh.write_text(json.dumps(self.results) + "\n")
        os.replace(fresh, self.into)


@contextmanager
def gathered(folder: Path, into: Path | None, earlier: dict[str, dict]) -> Iterator[None]:
    """Within the block, keep `into` up to date with the results in `folder`."""
    if into is None:
        yield
        return
    results, ended = Gathered(folder, into, earlier), Event()

    def follow() -> None:
        while not ended.wait(LOOK):
            results.update()

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        results.update()
