"""vLLM's CPU build, in a process of its own environment (`make .venv-vllm/.installed`)."""

import json
import os
import subprocess
from collections import deque
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from bench.e2e.cpu import module
from bench.e2e.long.drawn import Drawn
from bench.e2e.long.sides import TEMPERATURE

WORKER = Path(__file__).with_name("vllm_worker.py")
# tokens drafted from the sequence's own text, as vLLM's documentation has it
NGRAM = 5


def as_folder(path: str, dtype: torch.dtype, tokenizer: Any, to: Path) -> str:
    """A folder that vLLM loads: the checkpoint as it is, or a GGUF file's numbers in `dtype`."""
    if not path.endswith(".gguf"):
        return path
    loaded = module(path, dtype)
    # the weights are no longer GGUF's: transformers would write what they were
    loaded.hf_quantizer = None
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    loaded.save_pretrained(to)
    tokenizer.save_pretrained(to)
    return str(to)


class Vllm:
    """Without drafts, or with the n-grams of each sequence."""

    def __init__(
        self, python: str, folder: str, dtype: torch.dtype, ends: set[int], length: int,
        samples: int, ngram: int = 0,
    ):  # fmt: skip
        self.ends = ends
        name = str(dtype).removeprefix("torch.")
        job = dict(
            model=folder, dtype=name, length=length, samples=samples, ends=sorted(ends),
            temperature=TEMPERATURE, ngram=ngram,
        )  # fmt: skip
        # as many threads as csd's side has: each side runs alone
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.process = subprocess.Popen(
            # -P: the worker's folder is no place to import from
            [python, "-P", str(WORKER), json.dumps(job)], env=os.environ | threads, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.log: deque[str] = deque(maxlen=20)
        self.reader = Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.reader.start()
        self.version = self._answer()["version"]

    def draw(self, ids: list[int], n: int, limit: int, seed: int) -> Drawn:
        """The engine's noise goes on from call to call: a seed of a request is slower there."""
        given = json.dumps({"ids": ids, "n": n, "limit": limit})
        self.process.stdin.write(given + "\n")
        self.process.stdin.flush()
        found = self._answer()
        return Drawn.cut(found["tokens"], self.ends, found["seconds"])

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.reader.join(5)
            raise RuntimeError("vLLM ended:\n" + "".join(self.log))
        return json.loads(line)
