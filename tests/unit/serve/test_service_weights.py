"""New weights of a service: later requests have them, and those in flight end before."""

import threading
import time

import pytest
import torch
from helpers.models import checkpoints
from helpers.runs.engine_cases import PROMPTS, assert_same_samples

import csd


def test_changed_weights_wait_for_what_is_in_flight():
    model = checkpoints.build("llama", dtype=torch.float64)
    prompt, options = PROMPTS[0], dict(num_samples=2, max_new_tokens=40, seed=1)
    with csd.AsyncEngine(model, max_slots=4, max_tokens=200) as service:
        before = service.submit(prompt, detached=True, **options)
        fingerprint = service.fingerprint
        next(iter(before))

        def change(engine):
            assert before.done
            with torch.no_grad():
                model.lm_head.weight.mul_(-1)

        asking = threading.Thread(target=service.update, args=(change,))
        asking.start()
        asking.join()
        after = service.submit(prompt, **options)
        assert after.result(60).tokens != before.result().tokens
        assert (before.weights, after.weights, service.weights) == (0, 1, 1)
        assert service.fingerprint != fingerprint
        with csd.Engine(model) as plainly:
            assert_same_samples([after.result()], [plainly.generate(prompt, **options)])
        # the same weights have the same one
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        again = service.submit(prompt, **options)
        assert again.result(60).tokens == before.result().tokens
        assert (again.weights, again.fingerprint) == (2, fingerprint)


def _write_in_place(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def _write_data(model):
    model.lm_head.weight.data.mul_(-1)


def _replace(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["lm_head.weight"] *= -1
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    ("change", "decoder", "mixes", "versions"),
    [
        (_write_in_place, "fused", True, 1),
        (_write_data, "fused", True, 1),
        (_replace, "fused", False, 1),
        (_replace, "module", True, 1),
    ],
)
def test_changes_outside_of_update(change, decoder, mixes, versions):
    """The table of docs/serve.md: which changes requests in flight mix with the old weights."""
    model = checkpoints.build("llama", dtype=torch.float64)
    options = dict(num_samples=4, max_new_tokens=10, seed=1, ignore_eos=True)
    with csd.AsyncEngine(model, max_slots=2, max_tokens=100, decoder=decoder) as service:
        old = service.submit(PROMPTS[0], **options).result(60)
        done = []

        def until(samples):
            # on the engine's thread, while later samples have not begun
            if not done:
                change(model)
                done.append(True)
            return False

        during = service.submit(PROMPTS[0], until=until, **options)
        assert (during.result(60).tokens != old.tokens) == mixes
        # a write through `.data` shows once nothing is in flight
        while service.engine.turn.lock.locked():
            time.sleep(0.001)
        after = service.submit(PROMPTS[0], **options)
        assert after.result(60).tokens != old.tokens
        assert (during.weights, after.weights) == (0, versions)


def test_weights_come_from_a_folder(tmp_path):
    model = checkpoints.build("llama", dtype=torch.float32)
    for name in ("a", "b"):
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
    with csd.AsyncEngine(str(tmp_path / "a"), max_slots=4, max_tokens=200) as service:
        first = service.submit([5, 6], max_new_tokens=20, seed=1).result(60)
        (tmp_path / "empty").mkdir()
        with pytest.raises((OSError, ValueError), match="empty"):
            service.update_weights(str(tmp_path / "empty"))
        assert service.submit([5, 6], max_new_tokens=20, seed=1).result(60).tokens == first.tokens
        assert service.update_weights(str(tmp_path / "b")) == 1
        second = service.submit([5, 6], max_new_tokens=20, seed=1).result(60)
        assert service.update_weights(str(tmp_path / "a")) == 2
        assert service.submit([5, 6], max_new_tokens=20, seed=1).result(60).tokens == first.tokens
        assert second.tokens != first.tokens
