"""LoRA beside the products of captured steps, on a GPU that is not there."""

from types import SimpleNamespace

import pytest
import torch
from helpers.runs.simulated_calls import model
from helpers.targets import slow
from simulated_gpu import Gpu

import csd
from csd.engine.step import static_step
from csd.models.fused.lora import FusedAdapters

pytestmark = pytest.mark.stand_in

RANK = 4
ASKED = dict(
    prompt=[5, 6, 7, 5, 6, 7, 5],
    num_samples=3,
    seed=1,
    max_new_tokens=10,
    temperature=0.8,
    budget=6,
)


class Linear:
    """The part of peft's layer that csd reads; no test can move peft's parameters to this GPU."""

    __module__, __qualname__ = "peft.tuners.lora.layer", "Linear"
    merged, merged_adapters, disable_adapters = False, (), False

    def __init__(self, weight, generator):
        def normal(*shape):
            drawn = torch.empty(shape).normal_(std=0.3, generator=generator)
            return SimpleNamespace(weight=drawn.to(weight.device))

        names = "default", "other"
        self.active_adapters = ["default"]
        self.base_layer = SimpleNamespace(weight=weight)
        self.lora_A = {name: normal(RANK, weight.shape[1]) for name in names}
        self.lora_B = {name: normal(weight.shape[0], RANK) for name in names}
        self.scaling = dict.fromkeys(names, 0.5)


def drawn(device):
    """Tokens by one adapter, by the other, and by the first one trained; captured graphs."""
    decoder = model(device)
    generator = torch.Generator().manual_seed(0)
    parts = [
        Linear(weight, generator)
        for layer in decoder.layers
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    parts.append(Linear(decoder.head, generator))
    decoder.add_adapters(FusedAdapters([[part] for part in parts]))
    with csd.Engine(decoder, max_slots=4, self_check=False) as e:
        found, graphs = [], []
        for change in (None, "other", "default"):
            for part in parts if change else ():
                part.active_adapters = [change]
                if change == "default":
                    # as an optimiser does
                    part.lora_B["default"].weight.neg_()
            found.append(e.generate(**ASKED).tokens)
            graphs.append(dict(e.captured))
    return found, graphs


@slow
def test_one_graph_serves_adapters_of_equal_shapes(monkeypatch):
    monkeypatch.setattr(static_step, "SIZES", (16, 32))
    want, _ = drawn("cpu")
    with Gpu() as gpu:
        got, graphs = drawn("cuda")
        assert gpu.replays > 10
    assert got == want and len({str(tokens) for tokens in got}) == 3
    assert graphs[0] and graphs[0].items() <= graphs[1].items() <= graphs[2].items()
