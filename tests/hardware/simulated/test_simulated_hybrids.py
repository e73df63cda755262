"""Captured steps of layers with a state, on a GPU that is not there."""

from dataclasses import fields, replace

import pytest
import torch
from helpers.models.families import build
from simulated_gpu import Gpu
from simulated_gpu.tensor import CUDA

import csd
from csd.engine.step import static_step
from csd.models.fused.decoder import HybridDecoder
from csd.models.fused.fuse import fuse

pytestmark = pytest.mark.stand_in

# a prompt of several chunks, and more samples than slots
ASKED = dict(
    prompt=[[(7 * i + 3) % 61 for i in range(n)] for n in (40, 5)],
    num_samples=3,
    seed=1,
    max_new_tokens=20,
    temperature=0.8,
    budget=6,
    end_token_ids=[],
)


def moved(part, device):
    """A part of a decoder with its tensors on a device."""
    found = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(
        part,
        **{
            name: moved(x, device)
            if name == "delta" and x is not None
            else x.to(device)
            if torch.is_tensor(x)
            else x
            for name, x in found.items()
        },
    )


def decoder_on(device):
    made = fuse(build("qwen3_5_text", torch.float32))
    whole = (made.norm, made.head)
    return HybridDecoder(
        made.config,
        made.embedding.to(device),
        [moved(layer, device) for layer in made.layers],
        *(x.to(device) for x in whole),
        frequencies=made.frequencies,
    )


def drawn(engine):
    return [out.tokens for out in engine.generate(**ASKED)]


def test_static_steps_are_captured_and_replayed(monkeypatch):
    monkeypatch.setattr(static_step, "SIZES", (16,))
    how = dict(max_slots=2, self_check=False, prefill_chunk=24)
    with csd.Engine(decoder_on("cpu"), **how) as e:
        want = drawn(e)
    with Gpu() as gpu, csd.Engine(decoder_on(CUDA), **how) as e:
        assert e.static and e.lag == 1
        assert drawn(e) == want
        first, graphs = gpu.replays, dict(e.captured)
        gpu.waits.clear()
        # a second call replays the first one's graphs, over states that begin anew
        assert drawn(e) == want
        assert gpu.replays > first and e.captured == graphs
        assert not gpu.waits
