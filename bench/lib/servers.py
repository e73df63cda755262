"""Other servers of a model, each run as a process in its own environment during a block."""

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from bench.lib.settings import of_transformers

NAME = "model"
# seconds to wait for a server's first answer: vLLM's first start compiles
WAIT = 900.0


def command(
    kind: str,
    python: str,
    folder: str,
    gguf: str | None,
    port: int,
    *,
    dtype: str,
    slots: int,
    tokens: int,
) -> list[str]:
    """Returns the command that serves a model, with the fastest options of its documentation.

    python: interpreter of an environment that has the package. folder: a checkpoint of
    transformers. gguf: a file with the same numbers. slots: most samples at once. tokens: most
    tokens of a prompt and a sample together.
    """
    if kind == "vllm":
        return [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            folder,
            "--served-model-name",
            NAME,
            "--port",
            str(port),
            "--dtype",
            dtype,
            "--max-model-len",
            str(tokens),
            "--max-num-seqs",
            str(slots),
        ]
    if kind == "transformers":
        return [
            python,
            "-c",
            "from transformers.cli.transformers import main; main()",
            "serve",
            folder,
            "--port",
            str(port),
            "--dtype",
            dtype,
            "--device",
            "cpu",
            "--continuous-batching",
        ]
    if kind == "llama":
        if gguf is None:
            raise ValueError("llama reads GGUF files: name one as the model")
        # its server processes one text at a time
        return [
            python,
            "-m",
            "llama_cpp.server",
            "--model",
            gguf,
            "--model_alias",
            NAME,
            "--port",
            str(port),
            "--n_ctx",
            str(tokens),
            "--n_threads",
            str(os.cpu_count()),
        ]
    raise ValueError(f"kind must be 'vllm', 'transformers' or 'llama', got {kind!r}")


def fields(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Fields of a request that draws with the settings, in the names that a kind of server reads.

    The names of csd and vLLM are those of the settings.
    """
    if kind == "transformers":
        own = GenerationConfig(do_sample=True, **of_transformers(settings))
        # it takes other fields than OpenAI's as one text
        return {"generation_config": own.to_json_string()}
    if kind == "llama":
        others = {name: x for name, x in settings.items() if name != "repetition_penalty"}
        return others | {"repeat_penalty": settings["repetition_penalty"]}
    return settings


@contextmanager
def running(arguments: list[str], name: str, port: int, log: Path) -> Iterator[tuple[str, str]]:
    """Run a server during the block; yields (URL, model name).

    Raises RuntimeError with the end of its log if the server exits or does not answer in time.
    """
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
    # transformers' /v1/models needs a hub cache, and llama's server has no /health
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
