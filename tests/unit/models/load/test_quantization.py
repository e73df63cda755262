"""Folders whose matrices are rounded to a type of GGUF files, and what engines print of weights."""

import gguf
import pytest
import torch
from helpers.models import checkpoints, families, gguf_files
from helpers.targets import values

import csd
from csd.cli.main import main
from csd.engine.first_call.time_steps import step_times_key
from csd.engine.resources.held_bytes import held_bytes
from csd.kernels.layers.quantized import Quantized, has_loop
from csd.models.fused.held import held_weights
from csd.models.load import load
from csd.models.load.quantize import TYPES

pytestmark = pytest.mark.skipif(not has_loop(), reason="no loop of quantised weights here")
WIDTHS = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
SAMPLED = dict(num_samples=2, max_new_tokens=6, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.make("qwen2", tmp_path_factory.mktemp("model"), **WIDTHS)


def rounded(weight, kind):
    """A matrix rounded to a type and back, by the gguf package."""
    number = gguf.GGMLQuantizationType[kind.upper()]
    blocks = gguf.quants.quantize(weight.float().numpy(), number)
    return torch.from_numpy(gguf.quants.dequantize(blocks, number))


def made(family, path):
    """A folder of a tiny model in bfloat16."""
    if family == "qwen2":
        return checkpoints.make(family, path, dtype=torch.bfloat16, **WIDTHS)
    more = dict(moe_intermediate_size=32, num_experts=6) if family == "qwen3_moe" else {}
    model = families.build(family, torch.bfloat16, **WIDTHS | more)
    model.save_pretrained(path)
    return str(path)


CASES = [("qwen2", kind) for kind in TYPES] + [("qwen3_moe", "q8_0"), ("qwen3_5_text", "q4_0")]


@values
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_folders_matrices_are_rounded_once(tmp_path, family, kind):
    path = made(family, tmp_path)
    plain = load(path, device="cpu", dtype=torch.bfloat16, packed=False).decoder
    loaded = load(path, device="cpu", quantization=kind)
    assert loaded.dtype == torch.float32 and type(loaded.decoder) is type(plain)
    pairs = [(loaded.decoder.head, plain.head), (loaded.decoder.embedding, plain.embedding)]
    for ours, given in zip(loaded.decoder.layers, plain.layers, strict=True):
        pairs += [(getattr(ours, n), getattr(given, n)) for n in ("qkv", "out", "gate_up", "down")]
        assert torch.equal(ours.input_norm, given.input_norm.float())
        if ours.experts is not None:
            pairs += zip(ours.experts.down, given.experts.down, strict=True)
            assert torch.equal(ours.experts.router, given.experts.router.float())
    for ours, given in pairs:
        if given is not None:
            assert isinstance(ours, Quantized)
            assert torch.equal(ours.dequantize(), rounded(given, kind))
    csd.Engine(path, device="cpu", quantization=kind).generate([1, 2, 3], **SAMPLED)


def test_matrices_of_other_widths_stay_plain_and_are_counted(tmp_path, caplog):
    path = checkpoints.make("qwen2", tmp_path, **WIDTHS | dict(intermediate_size=72))
    decoder = load(path, device="cpu", quantization="q8_0").decoder
    assert decoder.layers[0].down.dtype == torch.float32
    assert not isinstance(decoder.layers[0].down, Quantized)
    assert f"{len(decoder.layers)} matrices have a number of columns" in caplog.text


def test_the_argument_reaches_every_call(folder):
    want = csd.Engine(folder, device="cpu", quantization="q4_0").generate([1, 2, 3], **SAMPLED)
    got = csd.generate(folder, [1, 2, 3], device="cpu", quantization="q4_0", **SAMPLED)
    assert got.tokens == want.tokens and "Q4_0" in got.stats.weights
    plain = csd.generate(folder, [1, 2, 3], device="cpu", **SAMPLED)
    assert "Q4_0" not in plain.stats.weights
    scored = csd.score(folder, [1, 2, 3], want.tokens, device="cpu", quantization="q4_0")
    assert [s.raw_logprobs for s in scored] == [s.raw_logprobs for s in want]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(quantization="q4_k"), "quantization must be one of 'q8_0', .*, got 'q4_k'"),
        (dict(quantization="q4_0", dtype="float32"), "dtype must be None with quantization"),
        (dict(quantization="q4_0", decoder="module"), "None with decoder='module'"),
    ],
    ids=["type", "dtype", "decoder"],
)
def test_refused_with_a_folder(folder, options, match):
    with pytest.raises(ValueError, match=match):
        csd.Engine(folder, device="cpu", **options)


def test_refused_with_a_file(tmp_path):
    path = gguf_files.write(gguf_files.build("llama"), tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=r"for a GGUF file, .*: leave it out, or pass the folder"):
        csd.Engine(path, device="cpu", quantization="q8_0")
    csd.Engine(path, device="cpu")


def test_refused_with_a_module(tmp_path):
    with pytest.raises(ValueError, match=r"already loaded, got 'q8_0': save it with save_pretrain"):
        csd.Engine(checkpoints.build("llama"), quantization="q8_0")
    checkpoints.build("llama").save_pretrained(tmp_path)
    csd.Engine(str(tmp_path), device="cpu", quantization="q8_0")


def test_what_is_printed_of_weights(folder):
    with csd.Engine(folder, device="cpu", quantization="q5_1") as engine:
        held = held_weights(engine.decoder)
        layers = engine.decoder.layers
        matrices = [w for x in layers for w in (x.qkv, x.out, x.gate_up, x.down)]
        matrices.append(engine.decoder.head)
        assert held.kinds == ("Q5_1",) and held.bytes == sum(w.bytes for w in matrices)
        assert f"(weights: {held})" in repr(engine)
        out = engine.generate([1, 2, 3], **SAMPLED)
        assert out.stats.weights == str(held) and f"weights in {held}" in str(out.stats)
        assert held_bytes(engine.decoder) >= held.bytes


@pytest.mark.slow
def test_doctor_prints_how_weights_are_held(tmp_path, capsys):
    path = gguf_files.quantised(tmp_path)
    assert main(["doctor", path, "--device", "cpu"]) == 0
    assert "\nweights: Q8_0, " in capsys.readouterr().out


def test_step_times_are_those_of_a_kind_of_weights(folder):
    keys = set()
    for kind in (None, "q8_0", "q4_0"):
        loaded = load(folder, device="cpu", quantization=kind)
        keys.add(step_times_key(loaded.decoder, torch.float32, "cpu", [1, 2]))
    assert len(keys) == 3 and None not in keys


def test_step_times_are_those_of_a_version_of_the_loops(folder, monkeypatch):
    from csd.kernels.numba import jit

    decoder = load(folder, device="cpu").decoder
    monkeypatch.setattr(jit, "stamp", lambda file: f"another {file.name}")
    other = step_times_key(decoder, torch.float32, "cpu", [1, 2])
    assert "another product.py" in other and "another cpu_ops.py" in other
    monkeypatch.undo()
    assert other != step_times_key(decoder, torch.float32, "cpu", [1, 2])


def test_experts_that_a_token_does_not_use_are_not_counted(tmp_path):
    decoder = load(made("qwen3_moe", tmp_path), device="cpu", quantization="q8_0").decoder
    E, used = len(decoder.layers[0].experts.router), decoder.config.experts_per_token
    all_of = sum(x.experts.gate_up.bytes + x.experts.down.bytes for x in decoder.layers)
    others = sum(x.qkv.bytes + x.out.bytes + 4 * E * 64 for x in decoder.layers)
    assert held_weights(decoder).bytes == round(others + all_of * used / E + decoder.head.bytes)
