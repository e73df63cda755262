"""Triton kernels and static steps, compared to the references on the device.

Covers every sampling rule, a prompt of several chunks and pages, a vocabulary of 128k, a call that
is closed midway, and captures while another thread uses the device.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

import csd
from bench.gpu.lib.parity_logits import logits
from bench.gpu.lib.section import Section
from bench.lib.common import traced
from bench.lib.shapes import SHAPES, random_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 30, 31, 9, 8]]
SAMPLES, NEW = 4, 24
# prompt of more than two chunks; more new tokens than a page
LONG_PROMPT, LONG_NEW, CHUNK = [[i * i % 97 for i in range(700)]], 70, 256
WIDE = 128256
CASES = {
    "greedy": dict(temperature=0.0),
    "0.7": dict(temperature=0.7),
    "top-p": dict(temperature=1.0, top_p=0.9),
    "top-k": dict(temperature=1.0, top_k=20),
    "min-p": dict(temperature=1.0, min_p=0.02),
    "penalty": dict(temperature=0.7, repetition_penalty=1.3),
    "stop ids": dict(temperature=1.0, stop_token_ids=list(range(40, 48)), min_new_tokens=3),
}
LONG = {"long prompt": dict(temperature=0.7)}


def run(section: Section) -> None:
    """Add one row per comparison; raises AssertionError at the end if one failed."""
    engines(section, "tiny", CASES | LONG)
    engines(section, f"{WIDE} tokens", {name: CASES[name] for name in ("0.7", "top-p", "top-k")})
    interruptions(section)
    logits(section)
    if section.call:
        section.skip("single kernels: in a call `doctor` and the kernels' tests cover them")
    else:
        kernels(section)
    wrong = [row["what"] for row in section.rows if not row["same"]]
    assert not wrong, f"not the same: {', '.join(wrong)}"


def model(section: Section, name: str):
    config = SHAPES["tiny"] if name == "tiny" else replace(SHAPES["tiny"], vocab=WIDE)
    return random_model(config, section.device, torch.float32)


def engine(section: Section, name: str, **options: Any) -> csd.Engine:
    how = dict(max_slots=6, prefill_chunk=CHUNK, self_check=False) | options
    return csd.Engine(model(section, name), **how)


def drawn(engine: csd.Engine, case: str, **more: Any) -> list[list[list[int]]]:
    """Draw a case; returns the tokens of every sample."""
    prompts, new = (LONG_PROMPT, LONG_NEW) if case in LONG else (PROMPTS, NEW)
    outs = engine.generate(
        prompts,
        num_samples=SAMPLES,
        max_new_tokens=new,
        seed=1,
        budget=10,
        **(CASES | LONG)[case],
        **more,
    )
    return [out.tokens for out in outs]


def engines(section: Section, name: str, cases: dict) -> None:
    """Compare whole generations in float32, whose tokens must not depend on how steps run."""
    fast = "triton" if section.cuda else "reference"
    sides = {"static": dict(kernels=fast, static=True)}
    if section.cuda:
        sides["triton"] = dict(kernels="triton", static=False)
    sides["plain"] = dict(kernels="reference", static=False)
    with engine(section, name, kernels="reference", static=False) as made:
        want = {case: drawn(made, case) for case in cases}
    for side, options in sides.items():
        if section.left <= 0:
            section.cut_off(f"{side} against reference, {name}")
            continue
        with engine(section, name, **options) as made:
            for case in cases:
                compare(
                    section,
                    f"{side} against reference, {name}, {case}",
                    want[case],
                    lambda case=case, made=made, side=side: drawn(
                        made, case, speculate=side != "plain"
                    ),
                )


def compare(section: Section, what: str, want: Any, call: Callable[[], Any]) -> None:
    """Add a row: True if `call` returns `want`. An error counts as False and is not raised."""
    try:
        section.add(what=what, same=call() == want)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:300]
        section.add(what=what, same=False, error=text, traceback=traced(error))


def interruptions(section: Section) -> None:
    """Check that tokens do not depend on other users of the engine and the device."""
    if section.left <= 0:
        section.cut_off("a call that is closed midway, and a second thread")
        return

    def closed(made: csd.Engine) -> list:
        with made:
            stream = made.stream(PROMPTS, num_samples=SAMPLES, max_new_tokens=NEW, seed=2)
            next(stream)
            stream.close()
            return drawn(made, "0.7")

    def beside(made: csd.Engine) -> list:
        with made, other_thread(section.device):
            return drawn(made, "0.7")

    how = dict(kernels="triton" if section.cuda else "reference", static=True)
    with engine(section, "tiny", kernels="reference", static=False) as made:
        want = drawn(made, "0.7")
    for what, call in (("behind a call closed midway", closed), ("beside a thread", beside)):
        compare(section, what, want, lambda call=call: call(engine(section, "tiny", **how)))


@contextmanager
def other_thread(device: torch.device) -> Iterator[None]:
    """During the block, another thread allocates, multiplies and waits on its own stream.

    Its random numbers are from a generator of its own: a capture claims the device's default one.
    """
    done, errors = threading.Event(), []

    def work() -> None:
        try:
            cuda = device.type == "cuda"
            generator = torch.Generator(device)
            with torch.cuda.stream(torch.cuda.Stream(device)) if cuda else nullcontext():
                while not done.is_set():
                    x = torch.randn(256, 256, device=device, generator=generator)
                    (x @ x).sum().item()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]


def kernels(section: Section) -> None:
    """Run the check of each kernel that has a benchmark."""
    if not section.cuda:
        section.skip("single kernels: `python -m bench kernels` on a GPU checks them")
        return
    command = [sys.executable, "-m", "bench.micro.kernels", "--only", "step"]
    command += ["--json", str(section.out / "kernels.json")]
    try:
        done = subprocess.run(command, timeout=max(section.left, 1), capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        # a comparison that was not finished counts as cut, not as wrong
        section.cut_off("single kernels: not all of them")
        return
    print(done.stdout[-3000:])
    section.add(what="every kernel of a step", same=done.returncode == 0, log=done.stderr[-6000:])
