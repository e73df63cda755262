"""Switches of peft's adapters while samples are drawn: these end as they began."""

import pytest
from helpers.models.lora_models import PROMPT, TOKENS, adapted, drawn, loop

import csd

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("released")]


def switch_to(model, change):
    """A callback that calls change(model) at its first call."""
    done = []

    def callback(*_):
        if not done:
            done.append(change(model))

    return callback


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_adapter("other"),
        lambda model: model.base_model.disable_adapter_layers(),
    ],
    ids=["other", "off"],
)
def test_a_call_ends_with_the_adapters_that_it_began_with(change):
    model = adapted()
    before = loop(model)
    assert drawn(model, callback=switch_to(model, change)) == before
    after = loop(model)
    assert after != before and drawn(model) == after


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.merge_adapter(),
        lambda model: model.delete_adapter("default"),
    ],
    ids=["merged", "deleted"],
)
def test_adapters_that_are_gone_are_an_error(change):
    model = adapted()
    with pytest.raises(RuntimeError, match="merged or removed during sampling"):
        drawn(model, callback=switch_to(model, change))
    assert drawn(model) == loop(model)


def test_a_switch_within_a_pass_has_it_run_once_more():
    from csd.models.lora import Adapters

    model = adapted()
    adapters, seen = Adapters(model.modules()), []

    def once():
        seen.append(model.active_adapters[0])
        if len(seen) == 1:
            model.set_adapter("other")
        return model.base_model.model.model.layers[0].self_attn.q_proj.active_adapters[0]

    assert adapters.run(once) == "default" and len(seen) == 2
    assert adapters.now() != adapters.state


def test_requests_in_flight_end_with_the_adapters_that_they_began_with():
    """Requests that come after a switch wait, and are drawn with the new adapters."""
    import threading

    model = adapted()
    of_default = loop(model)
    model.set_adapter("other")
    of_other = loop(model)
    model.set_adapter("default")
    options = dict(seed=4, temperature=0.7, end_token_ids=[])
    with csd.AsyncEngine(model, budget=8, max_slots=6) as service:
        began, switched = threading.Event(), threading.Event()

        def hold(prefix):
            began.set()
            assert switched.wait(60)
            return False

        # its sample 0 ends first, and the others with it
        long = service.submit(PROMPT, num_samples=2, max_new_tokens=TOKENS, until=hold, **options)
        short = service.submit(PROMPT, num_samples=1, max_new_tokens=2, until=hold, **options)
        assert began.wait(60)
        model.set_adapter("other")
        later = service.submit(PROMPT, num_samples=2, max_new_tokens=TOKENS, **options)
        switched.set()
        assert short.result(60).tokens == [of_default[0][:2]]
        assert long.result(60).tokens == of_default
        assert later.result(60).tokens == of_other != of_default
        assert [h.weights for h in (long, short, later)] == [0, 0, 1]
        assert len({long.fingerprint, short.fingerprint, later.fingerprint}) == 2
    assert drawn(model) == of_other
