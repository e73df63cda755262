"""State of torch around a call, wrappers of its model and flags of its config change no sample."""

from contextlib import ExitStack, contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from helpers.models.families import build
from helpers.runs.fuzzing import examples
from hypothesis import example, given
from hypothesis import strategies as st

import csd
from csd.utils.torch_state import _State

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = [(7 * i + 3) % 61 for i in range(20)]
# fused, experts and states in the fused decoder, and modules
FAMILIES = ["llama", "qwen3_moe", "qwen3_5_text", "gemma", "mixtral", "gpt_oss", "olmoe"]


@contextmanager
def setting(function, value, before):
    function(value)
    try:
        yield
    finally:
        function(before)


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def sdpa(kind):
    return torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kind))


STATES = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype bfloat16": lambda: setting(
        torch.set_default_dtype, torch.bfloat16, torch.float32
    ),
    "default dtype float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "a device's context": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "products in bfloat16": lambda: setting(
        torch.set_float32_matmul_precision, "medium", "highest"
    ),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "a function mode": Passing,
    "attention by flash": lambda: sdpa("FLASH_ATTENTION"),
    "attention by products": lambda: sdpa("MATH"),
    "errors of numpy": lambda: np.errstate(all="raise"),
}


def _compile_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def _compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _compile_in_place(model):
    model.compile(backend="eager")
    return model


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": _compile_in_place,
    "compiled layers": _compile_layers,
    "compiled forward": _compile_forward,
    "data parallel": torch.nn.DataParallel,
    "averaged": torch.optim.swa_utils.AveragedModel,
    "data parallel, compiled": lambda model: torch.compile(
        torch.nn.DataParallel(model), backend="eager"
    ),
}
FLAGS = ("output_router_logits", "output_hidden_states", "output_attentions", "use_cache")


def drawn(model, **more):
    out = csd.generate(
        model,
        PROMPT,
        num_samples=2,
        seed=4,
        max_new_tokens=5,
        temperature=0.7,
        budget=4,
        end_token_ids=[],
        **more,
    )
    return out.tokens, out.logprobs


@cache
def undisturbed(family, fused):
    """Tokens and log-probabilities by the fused decoder or the module."""
    model = build(family, torch.float32)
    return drawn(engine(model, decoder="fused" if fused else "module"))


def engine(model, **more):
    # most of their operations are torch's, which its state could change
    return csd.Engine(model, kernels="reference", **more)


def within(states, act):
    """Result of `act()` within the states; they are as before after it."""
    with ExitStack() as stack:
        for name in states:
            stack.enter_context(STATES[name]())
        before = _State.now()
        found = act()
        assert _State.now() == before
        return found


@examples(few=8, many=10_000)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from([*STATES]), max_size=3, unique=True),
    st.sampled_from([*WRAPPERS]),
    st.sets(st.sampled_from(FLAGS), max_size=2),
    st.booleans(),
)
# weights that are tensors of inference mode
@example("llama", ["inference mode"], "averaged", set(), True)
def test_samples_do_not_depend_on_what_is_around_a_call(family, states, wrapper, flags, inside):
    model = build(family, torch.float32)
    if "output_attentions" in flags:
        # PyTorch's attention returns no scores
        model.set_attn_implementation("eager")
    for flag in flags:
        setattr(model.config, flag, flag != "use_cache")
    config = model.config.to_dict()

    def act():
        wrapped = WRAPPERS[wrapper](model)
        made = engine(wrapped)
        return made, drawn(made)

    if inside:
        made, found = within(states, act)
    else:
        made = engine(WRAPPERS[wrapper](model))
        found = within(states, lambda: drawn(made))
    want = undisturbed(family, made.decoder.name == "fused")
    assert found[0] == want[0]
    assert found[1] == want[1]
    assert model.config.to_dict() == config
