"""csd's GRPOTrainer: the trainer's log-probabilities are the sampler's, and its gradients TRL's."""

import json
from pathlib import Path

import pytest
import torch
from helpers.examples_main import main_of
from helpers.targets import slow

from csd.models.demo import toy

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")


def train(file="grpo/grpo.py", stock=False, rollout=None, **config):
    """Train an example; returns the trainer and its log."""
    import trl

    from csd.integrations.trl import GRPOTrainer, Rollout

    main = main_of(file)
    main.__globals__["GRPOTrainer"] = trl.GRPOTrainer if stock else GRPOTrainer
    trainer = main(tokens=12, rollout=rollout or Rollout(budget=16, exact=True), **config)
    return trainer, [row for row in trainer.state.log_history if "loss" in row]


LORA = dict(file="grpo/grpo_lora.py", disable_dropout=True)
FILTERS = dict(temperature=0.7, top_p=0.9)
CASES = {
    "full": dict(),
    "filters": FILTERS,
    "accumulation": FILTERS | dict(batch=8, gradient_accumulation_steps=4),
    "lora": LORA,
    "lora, reference": LORA | dict(beta=0.1, temperature=0.7),
    "lora, autocast": LORA | dict(bf16=True, repetition_penalty=1.1),
}


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("accumulation", 3),
        ("lora, reference", 3),
        *(pytest.param(name, 50, marks=slow) for name in CASES),
    ],
)
def test_the_trainers_log_probabilities_are_the_rollouts(case, steps):
    trainer, log = train(steps=steps, **CASES[case])
    assert len(log) == steps
    assert [row["csd/logp_diff_max"] for row in log] == [0.0] * steps
    assert all(row["grad_norm"] > 0 for row in log[:3])
    assert max(row["csd/tau"] for row in log) > 1
    assert all(row["csd/rows"] < row["csd/rows_without_sharing"] for row in log)
    assert all(row["csd/train_tokens_per_second"] > 0 for row in log)
    seconds = [(row["csd/rollout_seconds"], row["csd/train_seconds"]) for row in log]
    assert sum(drawing for drawing, _ in seconds) == pytest.approx(trainer.rollout_func.seconds)
    # TRL measures the same micro-batches, inside
    assert all(sum(x) >= r["step_time"] for x, r in zip(seconds, log, strict=True))
    if "kl" in log[0]:
        # a new adapter is the base model, bit for bit
        assert log[0]["kl"] == 0.0 < log[-1]["kl"]


def weights(trainer):
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return {name: p.detach().double() for name, p in named if p.requires_grad}


@pytest.mark.parametrize("kind", [{}, pytest.param(LORA, marks=slow)], ids=["full", "lora"])
def test_an_update_is_that_of_trls_own_trainer(kind):
    """The optimiser is SGD, which keeps differences as small as they are."""
    config = kind | dict(steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.0)
    (mine, log), (own, stock) = (train(stock=stock, **config) for stock in (False, True))
    before = weights(train(stock=True, **config | dict(learning_rate=0.0))[0])
    found, want = weights(mine), weights(own)
    assert log[0]["loss"] == pytest.approx(stock[0]["loss"], abs=1e-5)
    assert log[0]["entropy"] == pytest.approx(stock[0]["entropy"], rel=1e-4)
    moved = 0
    for name, weight in want.items():
        step = weight - before[name]
        # the gradient's rounding in float32, and that of the updated weight
        limit = 1e-4 * step.abs().max() + 2 * torch.finfo(torch.float32).eps * weight.abs().max()
        assert (found[name] - weight).abs().max() <= limit, name
        moved = max(moved, float(step.abs().max()))
    assert moved > 1e-3


def test_a_run_is_that_of_trls_own_training_half():
    """Adapters are trained for 24 steps on the rollouts of both: a step draws by all before it."""
    config = LORA | dict(batch=8, seed=5)
    (mine, log), (own, stock) = (train(stock=stock, steps=24, **config) for stock in (False, True))
    assert own.args.optim.startswith("adamw")
    rewards = [row["reward"] for row in log]
    assert rewards == [row["reward"] for row in stock] and len(set(rewards)) > 20
    # of about 0.1 at random
    assert rewards[-1] > 0.5
    for name in ("grad_norm", "loss", "entropy"):
        want = pytest.approx([row[name] for row in stock], rel=1e-3, abs=1e-5)
        assert [row[name] for row in log] == want, name
    before = weights(train(stock=True, steps=1, learning_rate=0.0, **config)[0])
    found, want = weights(mine), weights(own)
    for name, weight in want.items():
        moved = (weight - before[name]).norm()
        # the first step's gradient of A is 0, since B is
        assert moved > 0.1 * weight.norm(), name
        assert (found[name] - weight).norm() <= 1e-3 * moved, name
    assert sum("lora_A" in name for name in want) == len(want) / 2


def test_any_completions_of_an_update_may_be_truncated():
    """The bits of i are the truncated ones of step i's four, two in each micro-batch."""
    from csd.integrations.trl import Rollout

    class Truncated(Rollout):
        def __call__(self, prompts, trainer):
            out = super().__call__(prompts, trainer)
            end = trainer.processing_class.eos_token_id
            for i, ids in enumerate(out["completion_ids"]):
                ids[-1] = end + 1 if trainer.state.global_step >> i & 1 else end
            return out

    config = dict(batch=2, num_generations=2, gradient_accumulation_steps=2, steps=16)
    config |= dict(mask_truncated_completions=True, optim="sgd", learning_rate=0.1)
    (mine, log), (own, stock) = (
        train(stock=stock, rollout=Truncated(budget=16, exact=True), **config)
        for stock in (False, True)
    )
    assert [row["grad_norm"] for row in log] == pytest.approx(
        [row["grad_norm"] for row in stock], rel=1e-3
    )
    assert log[-1]["grad_norm"] == 0 < sum(row["grad_norm"] > 0 for row in log)
    before = weights(train(stock=True, **config | dict(steps=1, learning_rate=0.0))[0])
    found, want = weights(mine), weights(own)
    for name, weight in want.items():
        moved = (weight - before[name]).abs().max()
        assert (found[name] - weight).abs().max() <= 1e-3 * moved, name


def test_accumulated_steps_are_those_of_one_batch():
    config = dict(steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.0)
    whole = weights(train(**config)[0])
    parts = weights(train(batch=8, gradient_accumulation_steps=4, **config)[0])
    for name, weight in whole.items():
        assert (parts[name] - weight).abs().max() <= 1e-5 * weight.abs().max(), name


def test_a_group_stays_in_one_micro_batch():
    log = train(steps=1, batch=8, gradient_accumulation_steps=4)[1]
    # a micro-batch has eight completions of one prompt
    assert log[0]["csd/rows_without_sharing"] / log[0]["csd/rows"] > 1.5


def test_later_updates_have_a_ratio_of_their_own():
    log = train(
        steps=4, batch=16, steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=1
    )[1]
    first = [row.get("csd/logp_diff_max") for row in log]
    assert first == [0.0, None, None, None]
    # the first update draws the completions of all four
    assert [row["csd/rollout_seconds"] > 0 for row in log] == [True, False, False, False]
    assert all(row["csd/train_seconds"] > 0 for row in log)


def test_what_the_trainer_does_not_do_is_refused():
    with pytest.raises(NotImplementedError, match="beta must be 0 with filters that drop tokens"):
        train(**LORA, steps=1, beta=0.1, top_p=0.9)
    with pytest.raises(ValueError, match=r"lora_dropout.* has dropout 0\.05 in training mode"):
        train(file="grpo/grpo_lora.py", steps=1)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        from csd.integrations import trl

        _ = trl.Other


@slow
def test_processes_train_on_one_set_of_bits(tmp_path, torchrun):
    done = torchrun(Path(__file__).with_name("grpo_exact_rank.py"), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)]
    assert [r["world"] for r in ranks] == [2, 2]
    assert ranks[0]["logged"] == [0.0, 0.0]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    # one whose completions are all truncated takes the step of the other
    assert ranks[0]["truncated"] == ranks[1]["truncated"]
    assert ranks[0]["norm"] > 0 and ranks[1]["rows"] == 0
    # one process with the batch of both takes the same step, up to the order of sums
    config = dict(optim="sgd", learning_rate=0.1, gradient_accumulation_steps=2)
    alone = weights(train(steps=2, batch=8, **config)[0])
    for name, total in ranks[0]["weights"].items():
        assert total == pytest.approx(float(alone[name].sum()), rel=1e-4, abs=1e-3), name


def test_the_loop_of_the_example():
    assert main_of("grpo/grpo_loop.py")(steps=3, tokens=12) == [0.0] * 3


def test_the_example_whose_reward_rises():
    main = main_of("grpo/grpo_letters.py")
    example = main.__globals__
    rows = example["problems"](200)
    assert rows == example["problems"](200) and len({row["prompt"] for row in rows}) == 200
    right = [" a b c d"] * 6
    texts = [" a b c d", " a b c", " d c b a", " a b c d\n e f g h", "", " ab c d"]
    assert example["in_place"](texts, right) == [1.0, 0.75, 0.0, 0.5, 0.0, 0.0]
    assert example["solved"](texts, right) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    trainer = main(steps=2, prompts=2, samples=4, tokens=4, model=toy())
    log = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["csd/logp_diff_max"] for row in log] == [0.0, 0.0]
    # `solved` is logged, and is no part of the reward
    assert [row["reward"] for row in log] == [row["rewards/in_place/mean"] for row in log]
    assert all("rewards/solved/mean" in row for row in log)
