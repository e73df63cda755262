"""`csd doctor MODEL --decoder`: the decoder that runs a model, and what its admission found."""

import json

import pytest
import torch
from helpers.models.families import build

from csd.cli.main import main

pytestmark = pytest.mark.quick

SIZES = ("heads", "kv_heads", "head_dim", "vocab")


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """doctor(family, *flags): the report, and the sizes at which kernels would be checked."""
    checked = []

    class Passed:
        failed = False

        def table(self):
            return "a table"

    monkeypatch.setattr(
        "csd.cli.doctor.check", lambda *_, config, **how: checked.append(config) or Passed()
    )
    monkeypatch.setattr("csd.cli.doctor.asdict", lambda report: {})

    def run(family, *flags):
        build(family, torch.float32).save_pretrained(tmp_path)
        code = main(["doctor", str(tmp_path), "--device=cpu", "--dtype=float32", *flags])
        text = capsys.readouterr()
        output = text.err if code else text.out
        return code, output, [tuple(getattr(c, n) for n in SIZES) for c in checked]

    return run


@pytest.mark.filterwarnings("ignore")
def test_a_module_is_described(doctor):
    code, out, sizes = doctor("glm", "--decoder=auto", "--json")
    found = json.loads(out)["admission"]
    assert code == 0 and found["decoder"] == "module"
    assert "model type 'glm' is not supported" in found["fused ruled out by"]
    assert "attention " in found["differences"] and "other rows" in found["differences"]
    assert found["static steps"] == "nothing in a pass reads the host"
    assert {f"model.layers.{i}.self_attn" for i in range(3)} <= found.keys()
    assert sizes == [(4, 2, 8, 61)]


@pytest.mark.filterwarnings("ignore")
def test_what_reads_the_host_is_named(doctor):
    _, out, _ = doctor("jetmoe", "--decoder=module")
    assert "static steps: JetMoe" in out and "reads a tensor on the host" in out


def test_a_fused_one_is_named(doctor):
    code, out, sizes = doctor("smollm3", "--decoder=auto")
    assert code == 0 and "decoder: fused" in out and sizes == [(4, 2, 8, 61)]


def test_a_model_that_no_decoder_runs_is_an_error(doctor):
    code, output, sizes = doctor("falcon", "--decoder=auto")
    assert (code, sizes) == (2, []) and "AttentionInterface" in output
