"""Other servers of a model, each in a process of its own environment while a block runs."""

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "model"
# seconds until one answers: vLLM's first start compiles
WAIT = 900.0


def command(
    kind: str, python: str, folder: str, gguf: str | None, port: int, *, dtype: str, slots: int,
    tokens: int,
) -> list[str]:  # fmt: skip
    """The command that serves a model, with the fastest options of its documentation.

    python: of an environment that has the package. folder: of transformers. gguf: the same numbers.
    slots: samples at once at most; tokens: of a prompt and a sample at most.
    """
    if kind == "vllm":
        return [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
            "--served-model-name", NAME, "--port", str(port), "--dtype", dtype,
            "--max-model-len", str(tokens), "--max-num-seqs", str(slots),
        ]  # fmt: skip
    if kind == "transformers":
        return [
            python, "-c", "from transformers.cli.transformers import main; main()", "serve",
            folder, "--port", str(port), "--dtype", dtype, "--device", "cpu",
            "--continuous-batching",
        ]  # fmt: skip
    if kind == "llama":
        if gguf is None:
            raise ValueError("llama reads GGUF files: name one as the model")
        # one text at once: its server has no more
        return [
            python, "-m", "llama_cpp.server", "--model", gguf, "--model_alias", NAME,
            "--port", str(port), "--n_ctx", str(tokens), "--n_threads", str(os.cpu_count()),
        ]  # fmt: skip
    raise ValueError(f"kind must be 'vllm', 'transformers' or 'llama', got {kind!r}")


@contextmanager
def running(arguments: list[str], name: str, port: int, log: Path) -> Iterator[tuple[str, str]]:
    """(URL, model name) while a server runs. Raises RuntimeError with what it wrote last."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2"}
    environment.pop("PYTHONPATH", None)
    with log.open("w") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=file, env=environment)
    try:
        start = time.monotonic()
        while not _answers(port):
            if process.poll() is not None or time.monotonic() - start > WAIT:
                raise RuntimeError(f"{' '.join(arguments)}: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1", name
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _answers(port: int) -> bool:
    # transformers' list of models needs a hub's cache, and llama's server has no health
    return any(_is_there(port, path) for path in ("/health", "/v1/models"))


def _is_there(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
