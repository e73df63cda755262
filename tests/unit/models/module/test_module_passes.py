"""Passes of a module, which leave it as it was, for other threads too, and see its changes."""

import threading

import pytest
import torch
from helpers.models.families import build
from helpers.runs.module_draws import PROMPT, drawn, plain

import csd
from csd.models import redirect as redirect_attention


def state(model):
    flags = [m.training for m in model.modules()]
    return model.config._attn_implementation, flags, [p.data_ptr() for p in model.parameters()]


def test_an_exception_in_a_pass_leaves_the_module_as_it_was():
    model = build("glm").train()
    model.model.layers[0].eval()
    engine = csd.Engine(model, decoder="module")
    want, before = drawn(engine, 4, temperature=0.7).tokens, state(model)
    assert state(model) == before

    def fail(*_):
        raise OSError("a hook fails")

    hook = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(OSError, match="a hook fails"):
        drawn(engine, 4, temperature=0.7)
    assert state(model) == before
    assert redirect_attention._replaced == {}
    hook.remove()
    assert drawn(engine, 4, temperature=0.7).tokens == want


def test_two_threads_draw_from_one_module_while_a_third_runs_it():
    model = build("gemma2")
    engines = [csd.Engine(model, decoder="module") for _ in range(2)]
    want = drawn(engines[0], 8, temperature=0.7).tokens
    ids, found, alone, over = torch.tensor([PROMPT]), [], [], threading.Event()
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits

    def draw(engine):
        found.extend(drawn(engine, 8, temperature=0.7).tokens for _ in range(4))

    def run():
        while not over.is_set():
            with torch.no_grad():
                alone.append(torch.equal(model(ids, use_cache=False).logits, logits))

    threads = [threading.Thread(target=draw, args=(e,)) for e in engines]
    other = threading.Thread(target=run)
    for thread in [*threads, other]:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    other.join()
    assert found == [want] * 8
    assert alone and all(alone)


def test_a_module_that_attends_in_another_order_is_an_error():
    model = build("glm")
    engine = csd.Engine(model, decoder="module")
    call = engine.decoder.calls[1]
    call.module = engine.decoder.calls[0].module
    with pytest.raises(
        RuntimeError, match="calls attention in another order than in its test pass"
    ):
        drawn(engine, 0, temperature=0.7)


def test_engines_that_generate_keeps_do_not_keep_the_module():
    import gc
    import weakref

    model = build("glm")
    with pytest.warns(UserWarning):
        csd.generate(model, PROMPT, max_new_tokens=2, budget=4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    # an engine of the user's own does
    engine = csd.Engine(build("glm"), decoder="module")
    gc.collect()
    assert drawn(engine, 0, temperature=0).tokens


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_weights_that_were_changed_in_place_are_in_the_next_call(name):
    model = build(name)
    engine = csd.Engine(model, decoder="module")
    before = drawn(engine, 4, temperature=0.7).tokens
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1.1)
    after = drawn(engine, 4, temperature=0.7).tokens
    assert after == [tokens for tokens, *_ in plain(model, temperature=0.7)] != before
