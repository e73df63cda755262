"""Threads of a step: one while other processes compete, all again when they have ended."""

from itertools import pairwise

import pytest
import torch

import csd
from csd.engine.step import thread_choice
from csd.engine.step.thread_choice import RECENT, SHARE, ThreadChoice
from csd.models.demo import toy
from csd.utils.device import group_quota, usable_cpus


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Machine:
    """Steps of a machine on which two threads take `two` seconds while others compete."""

    def __init__(self, choice):
        self.choice, self.now, self.steps = choice, 0.0, []

    def run(self, seconds, one, two):
        end = self.now + seconds
        while self.now < end:
            threads = self.choice._trial or self.choice.threads
            took = one if threads == 1 else two
            self.now += took
            self.steps.append((threads, took))
            self.choice.learn(took, took, self.now)


def test_undisturbed_steps_keep_all_threads_but_for_trials(two_threads):
    machine = Machine(ThreadChoice())
    machine.run(60, one=0.05, two=0.03)
    assert machine.choice.threads == 2
    assert len(machine.steps) > (1 - 2 * SHARE) * 60 / 0.03


@pytest.mark.parametrize("two", [0.1, 0.5, 3.0])
def test_a_busy_machine_gets_one_thread_and_trials_take_their_share(two_threads, two):
    machine = Machine(ThreadChoice())
    machine.run(RECENT * two + 5, one=0.05, two=two)
    assert machine.choice.threads == 1
    machine.steps.clear()
    machine.run(600, one=0.05, two=two)
    best = len(machine.steps) * 0.05
    assert sum(took for _, took in machine.steps) < best * (1 + 2 * SHARE)


@pytest.mark.parametrize("two", [0.2, 0.5, 3.0])
def test_two_slow_steps_are_enough_when_others_begin(two_threads, two):
    for quiet in (0.2, 5.0, 7.3, 30.0):
        machine = Machine(ThreadChoice())
        machine.run(quiet, one=0.05, two=0.03)
        machine.steps.clear()
        machine.run(2 * two + 1, one=0.05, two=two)
        assert machine.choice.threads == 1
        assert sum(threads == 2 for threads, _ in machine.steps) <= 3, quiet


def test_a_trial_ends_with_a_step_that_takes_far_too_long(two_threads):
    machine = Machine(ThreadChoice())
    machine.run(20, one=0.05, two=0.5)
    machine.steps.clear()
    machine.run(100, one=0.05, two=0.5)
    slow = [i for i, (threads, _) in enumerate(machine.steps) if threads == 2]
    assert slow and all(later - earlier > 1 for earlier, later in pairwise(slow))


def test_all_threads_return_when_the_others_have_ended(two_threads):
    machine = Machine(ThreadChoice())
    machine.run(20, one=0.05, two=0.5)
    assert machine.choice.threads == 1
    machine.run(40, one=0.05, two=0.03)
    assert machine.choice.threads == 2
    machine.steps.clear()
    machine.run(60, one=0.05, two=0.03)
    assert len(machine.steps) > (1 - 2 * SHARE) * 60 / 0.03


def test_two_threads_that_are_faster_in_spite_of_others_stay(two_threads):
    machine = Machine(ThreadChoice())
    machine.run(60, one=0.05, two=0.04)
    assert machine.choice.threads == 2
    assert {threads for threads, _ in machine.steps} == {1, 2}
    assert len(machine.steps) > (1 - 2 * SHARE) * 60 / 0.04


def test_tokens_do_not_depend_on_the_choice_and_the_caller_keeps_its_threads(
    two_threads, monkeypatch
):
    model, tokenizer = toy()
    options = dict(num_samples=4, max_new_tokens=40, seed=0, tokenizer=tokenizer)
    with csd.Engine(model, self_check=False) as engine:
        want = engine.generate("a b a b", **options).tokens
        # both numbers of threads run, by turns
        monkeypatch.setattr(thread_choice, "PAUSE", 0.0)
        ran, set_threads = set(), torch.set_num_threads
        monkeypatch.setattr(torch, "set_num_threads", lambda n: (ran.add(n), set_threads(n)))
        for _ in range(3):
            assert engine.generate("a b a b", **options).tokens == want
    assert ran == {1, 2}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "files, want",
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
    ids=["second", "second-none", "first", "first-none", "damaged", "absent"],
)
def test_the_quota_of_a_control_group(tmp_path, files, want):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert group_quota(tmp_path) == want


def test_a_call_uses_no_more_threads_than_the_process_may(two_threads, monkeypatch):
    from csd.utils import torch_state

    monkeypatch.setattr(torch_state, "usable_cpus", lambda: 1)
    with torch_state.plain_torch():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    assert usable_cpus() >= 1


@pytest.mark.parametrize("agree", [True, False])
def test_an_exact_engine_keeps_its_threads_where_products_differ(two_threads, monkeypatch, agree):
    from csd.models.exact_products import ExactProducts

    def product(x, weight, bias=None):
        y = torch.nn.functional.linear(x, weight, bias)
        return y if agree else y + torch.get_num_threads()

    weights = [torch.randn(32, 64), torch.randn(16, 64)]
    monkeypatch.setattr("csd.models.exact_products.in_loops", lambda weight: False)
    products = ExactProducts(product)
    assert products.threads_agree(weights, 2) is agree
    assert torch.get_num_threads() == 2
