"""A GGUF file whose quantised matrices stay as they are: its header, its memory, and its errors."""

import logging
import os
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from gguf_vocabularies import byte_level, size
from helpers.models import gguf_files

import csd
from csd.kernels.layers.quantized import Quantized, has_loop
from csd.models.fused.fuse import fuse
from csd.models.load import gguf as gguf_model
from csd.models.load import load
from csd.models.load.gguf import header

needs_loop = pytest.mark.skipif(not has_loop(), reason="no loop of quantised weights here")


def test_a_header_is_that_of_the_gguf_package(tmp_path):
    keys = byte_level("<b>", "<e>") | {"general.tags": ["a", "ä"], "general.some": [1, 2]}
    path = gguf_files.quantised(tmp_path, keys=keys | {"general.yes": True, "general.real": -0.5})
    have, reader = header.header_of(path), gguf.GGUFReader(path)
    texts = {n: [*v] for n, v in have.keys.items() if isinstance(v, header.ByteTexts)}
    plain = have.keys | {n: [text.decode() for text in v] for n, v in texts.items()}
    want = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    assert plain == want and len(texts["tokenizer.ggml.tokens"]) == size(keys)
    for ours, theirs in zip(have.tensors, reader.tensors, strict=True):
        assert (ours.name, ours.kind) == (theirs.name, theirs.tensor_type)
        assert ours.shape == (*reversed(theirs.shape.tolist()),)
        assert np.array_equal(ours.read(), theirs.data)


@pytest.mark.parametrize("architecture", ["qwen2", "mamba"])
@pytest.mark.parametrize("left", [0.02, 0.1, 0.5, 0.999])
def test_a_cut_file_is_refused_first_for_being_cut(tmp_path, left, architecture):
    named = {} if architecture == "qwen2" else {"general.architecture": architecture}
    path = gguf_files.quantised(tmp_path, keys=byte_level("<b>", "<e>") | named)
    os.truncate(path, int(left * os.path.getsize(path)))
    with pytest.raises(ValueError, match=r"tiny.gguf' is cut off: the file .* bytes") as error:
        load(path, device="cpu")
    assert "supported" not in str(error.value)


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"GGML", "does not begin as a GGUF file"),
        (4, struct.pack(">I", 3), "version must be 2 or 3"),
        (8, struct.pack("<Q", 1 << 60), "cut off"),
        (24, struct.pack("<Q", (1 << 64) - 1), "cut off"),
    ],
    ids=["magic", "byte order", "count", "length"],
)
def test_a_damaged_header_is_refused(tmp_path, at, value, match):
    path = gguf_files.quantised(tmp_path)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(value)
    with pytest.raises(ValueError, match=match):
        load(path, device="cpu")


@needs_loop
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "qwen3moe"])
def test_a_decoder_without_a_module_is_that_of_the_module(tmp_path, architecture):
    path = gguf_files.quantised(tmp_path, {"gate_inp": "F32"}, "Q8_0", architecture)
    read, module = gguf_model.read(path, None, False), gguf_model.read(path, None)
    ours, theirs = read.decoder, fuse(module)
    assert ours.config == theirs.config and type(ours) is type(theirs)
    assert read.generation_config == module.generation_config
    for name in ("cos", "sin", "local_cos", "local_sin", "norm"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    pairs = [(ours.embedding, theirs.embedding), (ours.head, theirs.head)]
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        pairs += [(a.qkv, b.qkv), (a.out, b.out), (a.down, b.down), (a.post_norm, b.post_norm)]
        pairs += [(a.experts.down, b.experts.down)] if a.experts else [(a.gate_up, b.gate_up)]
    for a, b in pairs:
        assert type(a) is type(b) and (a is None or torch.equal(plain(a), plain(b)))


def plain(x):
    return x.dequantize() if hasattr(x, "parts") or hasattr(x, "matrices") else x


@needs_loop
def test_types_that_are_not_multiplied_are_unpacked_and_named(tmp_path, caplog):
    kinds = {"attn_output.weight": "F16", "ffn_down.weight": "BF16", "attn_k.weight": "F32"}
    path = gguf_files.quantised(tmp_path, kinds, "Q4_0")
    with caplog.at_level(logging.WARNING, "csd"):
        decoder = load(path, device="cpu").decoder
    layers = len(decoder.layers)
    (message,) = [r.getMessage() for r in caplog.records if "unpacked" in r.getMessage()]
    # queries and values are multiplied together with the keys
    kinds = {"Q4_0": 2 * layers, "F16": layers, "BF16": layers}
    assert all(f"{count} of type {kind}" in message for kind, count in kinds.items())
    extra = 2 * (64 * 64 + 64 * 96) + (4 - 18 / 32) * (64 * 64 + 32 * 64)
    assert f"{layers * extra / 1e6:.1f} MB more" in message
    layer = decoder.layers[0]
    assert isinstance(layer.gate_up, Quantized) and layer.qkv.dtype == torch.float32
    assert not any(isinstance(w, Quantized) for w in (layer.qkv, layer.out, layer.down))
    # the steps of mixed layers run
    csd.Engine(path, device="cpu").generate([1, 2, 3], num_samples=2, max_new_tokens=4, seed=0)


PROGRAM = """
import sys
from csd.models.load import load

def peak():
    # `ru_maxrss` of a new process begins at that of the process that starts it
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

load(sys.argv[1], device="cpu")
before = peak()
load(sys.argv[2], device="cpu")
print(peak() - before)
"""


@needs_loop
def test_memory_of_a_load_is_little_more_than_the_file(tmp_path):
    """Neither mapped pages nor copies of matrices are held beside the weights."""
    small = gguf_files.quantised(tmp_path)
    hidden, width = 2048, 32768
    model = gguf_files.build("qwen2", **gguf_files.WHOLE_BLOCKS | dict(num_hidden_layers=1))
    c, q8 = model.config, gguf.GGMLQuantizationType.Q8_0
    tensors, types = {}, {}
    for name, w in gguf_files.tensors_of(model).items():
        shape = [{64: hidden, 96: width}.get(n, n) for n in w.shape]
        tensors[name] = np.zeros(shape, np.float32) if w.ndim == 1 else None
        if w.ndim > 1:
            tensors[name], types[name] = np.zeros((shape[0], shape[1] // 32 * 34), np.uint8), q8
    kv = hidden // c.num_attention_heads * c.num_key_value_heads
    for part in "kv":
        tensors[f"blk.0.attn_{part}.weight"] = np.zeros((kv, hidden // 32 * 34), np.uint8)
        tensors[f"blk.0.attn_{part}.bias"] = np.zeros(kv, np.float32)
    c.hidden_size, c.intermediate_size, c.head_dim = hidden, width, hidden // c.num_attention_heads
    path = tmp_path / "large.gguf"
    gguf_files.write(model, path, tensors=tensors, types=types)
    run = [sys.executable, "-c", PROGRAM, small, str(path)]
    grown = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert 0.9 * path.stat().st_size < grown < 1.25 * path.stat().st_size
