"""Side of vLLM's CPU build, a process in its own environment (`make .venv-vllm/.installed`)."""

import json
import os
import subprocess
import tempfile
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from bench.e2e.cpu import module
from bench.e2e.long.drawn import Drawn
from bench.e2e.long.plan import VLLM
from bench.lib.models import dtype_of_peers
from bench.lib.settings import PLAIN

WORKER = Path(__file__).with_name("vllm_worker.py")
# tokens drafted from the sequence's own text, as in vLLM's documentation
NGRAM = 5


def as_folder(path: str, dtype: torch.dtype, tokenizer: Any, to: Path) -> str:
    """Folder for vLLM: the checkpoint itself, or one written from a GGUF file in `dtype`."""
    if not path.endswith(".gguf"):
        return path
    loaded = module(path, dtype)
    # the weights are no longer quantised, but transformers would write that they are
    loaded.hf_quantizer = None
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    loaded.save_pretrained(to)
    tokenizer.save_pretrained(to)
    return str(to)


class Vllm:
    """vLLM without drafts, or with drafts from the n-grams of each sequence."""

    def __init__(
        self,
        python: str,
        folder: str,
        dtype: torch.dtype,
        ends: set[int],
        length: int,
        samples: int,
        ngram: int = 0,
        settings: dict[str, Any] = PLAIN,
    ):
        self.ends = ends
        name = str(dtype).removeprefix("torch.")
        job = dict(
            model=folder,
            dtype=name,
            length=length,
            samples=samples,
            ends=sorted(ends),
            settings=settings,
            ngram=ngram,
        )
        # as many threads as csd, since each side runs alone
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.process = subprocess.Popen(
            # -P: do not import from the worker's folder
            [python, "-P", str(WORKER), json.dumps(job)],
            env=os.environ | threads,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.log: deque[str] = deque(maxlen=20)
        self.reader = Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.reader.start()
        self.version = self._answer()["version"]

    def draw(self, ids: list[int], n: int, limit: int, seed: int) -> Drawn:
        """Draw n samples. `seed` is unused: per-request seeds are slower in vLLM.

        The engine's generator continues from call to call.
        """
        answer = self.call([ids], n, limit)
        return Drawn.cut(answer["samples"][0], self.ends, answer["seconds"])

    def call(
        self,
        prompts: list[list[int]],
        n: int,
        limit: int,
        ignore_eos: bool = False,
        clear: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Draw n samples of each prompt in one call.

        Args:
            clear: empty the prefix cache first.
            settings: in place of those of the side.

        Returns:
            samples (tokens by prompt and sample), seconds, and processor: seconds of the worker's
            process.
        """
        request = dict(prompts=prompts, n=n, limit=limit, ignore_eos=ignore_eos, clear=clear)
        request["settings"] = settings
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

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


def open_sides(
    python: str, path: str, loaded: Any, length: int, samples: int, ends: set[int], stack: ExitStack
) -> dict[str, Vllm]:
    """vLLM plain and with n-grams, by name, over the checkpoint at `path`; `stack` closes them.

    length: most tokens of a sequence. samples: most at once.
    """
    to = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    dtype = dtype_of_peers(loaded.decoder)
    folder = as_folder(path, dtype, loaded.tokenizer, to)
    sides = {}
    for name, ngram in zip(VLLM, (0, NGRAM), strict=True):
        sides[name] = Vllm(python, folder, dtype, ends, length, samples, ngram)
        stack.callback(sides[name].close)
    return sides
