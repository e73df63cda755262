"""Models that benchmarks take by name, and the settings that they are measured with."""

import hashlib
import json
import zipfile
from dataclasses import replace

import pytest
import transformers

from bench.e2e import settings as settings_command
from bench.e2e.long.plan import CSD
from bench.lib import models
from bench.lib.llama_cpp import sampler
from bench.lib.models import MODELS, Published, ids_of, join, path_of
from bench.lib.servers import fields
from bench.lib.settings import DEFAULTS, PLAIN, of_transformers, settings_of, words
from csd.models.demo import smollm2_path, toy

pytestmark = pytest.mark.bench

WHOLE = bytes(range(256)) * 3
QWEN = PLAIN | {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}


@pytest.fixture
def published(tmp_path):
    """A file of eleven pieces, with their wheels in a folder."""
    digest, step = hashlib.sha256(WHOLE).hexdigest(), len(WHOLE) // 11
    model = Published("whole.gguf", "a-part", "1.0", 11, len(WHOLE), digest, {"top_k": 7})
    for i in range(1, 12):
        with zipfile.ZipFile(tmp_path / f"a_part{i}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"a_part{i}/__init__.py", "")
            end = None if i == 11 else i * step
            wheel.writestr(f"a_part{i}/data/part{i:02}.bin", WHOLE[(i - 1) * step : end])
    return model


def test_pieces_are_joined_in_the_order_of_their_numbers(published, tmp_path):
    join(published, tmp_path, tmp_path / "whole.gguf")
    assert (tmp_path / "whole.gguf").read_bytes() == WHOLE


@pytest.mark.parametrize("fault", ["size", "sha256", "missing", "two pieces"])
def test_a_file_that_differs_does_not_appear(published, tmp_path, fault):
    if fault == "missing":
        (tmp_path / "a_part3-1.0-py3-none-any.whl").unlink()
    elif fault == "two pieces":
        with zipfile.ZipFile(tmp_path / "a_part3-1.0-py3-none-any.whl", "a") as wheel:
            wheel.writestr("a_part3/data/more.bin", "")
    else:
        published = replace(published, **{fault: "0" if fault == "sha256" else 1})
    with pytest.raises(ValueError, match=r"must have"):
        join(published, tmp_path, tmp_path / "whole.gguf")
    assert not (tmp_path / "whole.gguf").exists()


def test_a_model_is_fetched_once_and_found_by_its_name(published, tmp_path, monkeypatch):
    asked = []

    def download(requirements, to):
        asked.append(requirements)
        for file in tmp_path.glob("*.whl"):
            (to / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(models, "_download", download)
    monkeypatch.setattr(models, "FOLDER", tmp_path / "models")
    monkeypatch.setitem(MODELS, "a", published)
    with pytest.raises(FileNotFoundError, match="python -m bench models a"):
        path_of("a")
    for _ in range(2):
        models.main(["a"])
    assert asked == [[f"a-part{i}==1.0" for i in range(1, 12)]]
    folder = tmp_path / "models/a"
    assert path_of("a") == str(folder / "whole.gguf")
    assert json.loads((folder / "generation_config.json").read_text()) == {"top_k": 7}
    # nothing of the download stays
    assert sorted(x.name for x in folder.iterdir()) == ["generation_config.json", "whole.gguf"]
    assert path_of(None) == path_of("demo") == smollm2_path() and path_of("a/b.gguf") == "a/b.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_published_settings_are_a_generation_config_that_csd_serves(name):
    config = transformers.GenerationConfig.from_dict(dict(MODELS[name].settings))
    found = settings_of(config)
    assert found == DEFAULTS | {k: v for k, v in MODELS[name].settings.items() if k != "do_sample"}
    assert settings_of(transformers.GenerationConfig()) == PLAIN
    # equal to csd's own reading of the same config, which transformers' options complete
    assert of_transformers(found)["min_p"] is None and of_transformers(QWEN)["top_k"] == 20


def test_a_base_model_reads_the_text_alone():
    _, tokenizer = toy()
    asked = tokenizer.decode(ids_of(tokenizer, "Hello"))
    assert asked.startswith("user: Hello") and asked.endswith("assistant: ")
    tokenizer.chat_template = None
    assert tokenizer.decode(ids_of(tokenizer, "Hello")) == "Hello"


def test_settings_in_words():
    assert words(None) == words(PLAIN) == "temperature 0.7, no filters"
    assert words(QWEN) == "temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.1"


def test_each_server_gets_the_settings_in_its_names():
    assert fields("vllm", QWEN) == QWEN
    assert fields("llama", QWEN)["repeat_penalty"] == 1.1
    own = json.loads(fields("transformers", QWEN)["generation_config"])
    assert (own["top_k"], own["top_p"], own["repetition_penalty"]) == (20, 0.8, 1.1)


class Lib:
    """Records the chain of samplers that llama.cpp would get."""

    def __init__(self):
        self.chain, self.accepted = [], []

    def __getattr__(self, name):
        return lambda *args: (name.removeprefix("llama_sampler_init_"), *args)

    def llama_sampler_chain_add(self, chain, link):
        self.chain.append(link)

    def llama_sampler_accept(self, chain, token):
        self.accepted.append(token)


def test_llama_cpp_gets_the_same_settings_in_the_order_of_transformers():
    lib = Lib()
    sampler(lib, 1000, QWEN | {"min_p": 0.1}, 5, [3, 4], 90)
    assert lib.chain == [
        ("penalties", 1000, 90, 1.1, 0.0, 0.0),
        ("temp", 0.7),
        ("top_k", 20),
        ("top_p", 0.8, 1),
        ("min_p", 0.1, 1),
        ("dist", 5),
    ]
    # the penalty counts the prompt
    assert lib.accepted == [3, 4]
    plain = Lib()
    sampler(plain, 1000, PLAIN, 5, [3, 4], 90)
    assert plain.chain == [("temp", 0.7), ("dist", 5)] and plain.accepted == []


def test_rates_with_settings_are_compared_within_a_pair():
    speeds = {"csd": 4.0, "csd without drafts": 3.0, "vLLM": 1.0}
    seen = []

    def side(name):
        def draw(ids, n, tokens, seed, settings):
            seen.append((seed, name, settings["top_k"]))
            return speeds[name] * n / (2 if settings["top_k"] else 1), 1.5 if name in CSD else None

        return draw

    sides = {name: side(name) for name in speeds}
    rows = settings_command.measure(sides, [[1]], 8, 80, 2, QWEN, PLAIN)
    assert [row["side"] for row in rows] == [*speeds]
    assert all(row["own / plain"] == row["low"] == row["high"] == 0.5 for row in rows)
    assert rows[0]["own tok/s"] == 16 and rows[0]["tau, own"] == 1.5
    assert rows[2]["csd / it"] == 4.0 and "csd / it" not in rows[0]
    # the pairs' orders are opposite, and both have every side with both settings
    first, second = seen[6:12], seen[12:]
    assert [x[1:] for x in first] == [x[1:] for x in second[::-1]] and len(set(first)) == 6
