"""A static step of a tiny model on public operators, with any drafter."""

import torch
from helpers.checks.nested import leaves_of
from helpers.checks.operators import OPERATORS
from torch.utils._python_dispatch import TorchDispatchMode

from bench.lib.shapes import random_model
from csd.engine.step.static_step import StaticStep
from csd.models.fused.config import ModelConfig
from csd.state.kv_cache import KVCache
from csd.state.slots import Slots


class OneDevice(TorchDispatchMode):
    """Rejects what makes or reads a tensor elsewhere than on a step's device, `meta`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in leaves_of((args, kwargs, found)):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                raise AssertionError(f"{func} on a tensor of the {x.device.type}")
        return found


CONFIG = ModelConfig(
    family="llama",
    vocab=97,
    hidden=32,
    intermediate=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    context=512,
    norm_eps=1e-5,
    rope_theta=10000.0,
)


def step_with(make, slots=3, device="cpu", observes=True):
    """make(ops, device) returns the drafter; all slots are live in one group.

    observes: whether the drafter reads the prompt, which it copies from the host.
    """
    config = CONFIG
    decoder = random_model(config, device, torch.float32)
    drafter = make(OPERATORS, torch.device(device))
    cache = KVCache(
        config,
        slots=slots,
        pages=8,
        prompt_pages=1,
        slot_pages=1,
        rows=64,
        dtype=torch.float32,
        device=device,
    )
    state = Slots.empty(slots, 97, 64, drafter.context, device=device)
    state.live.fill_(True)
    for name, value in dict(group=0, max_new=60, key=5, context=3, prompt_len=7).items():
        getattr(state, name).fill_(value)
    state.group_key.fill_(1)
    state.sample.copy_(torch.arange(slots, device=device))
    cache.prompt_pages.fill_(4)
    cache.k.zero_(), cache.v.zero_()
    cache.slot_pages.copy_(torch.arange(slots, device=device)[:, None])
    drafter.attach(decoder, cache)
    if observes:
        drafter.observe_prompt(1, [3] * 8, 0, 8, state)
    return StaticStep(decoder, drafter, cache, state, OPERATORS)
