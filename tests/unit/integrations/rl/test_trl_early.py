"""GRPO steps whose groups end with their first samples where these all have the full reward."""

from types import SimpleNamespace

import pytest
import torch
from helpers.examples_main import main_of

from csd.models.demo import toy

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

# prompts of the example: all their samples are right, wrong, and right but for a later one
RIGHT, WRONG, LATER = "aeiou", "Write vowels: ", "Sing: "
FIRST, SIZE = 4, 8


class Judge:
    """A reward function that rates each text of a prompt, and keeps what it was asked."""

    def __init__(self, wrong=()):
        self.wrong, self.asked = set(wrong), []

    def __call__(self, prompts, completions, log_extra, **_):
        self.asked += zip(prompts, completions, strict=True)
        log_extra("length", [len(text) for text in completions])
        return [self.rate(*row) for row in zip(prompts, completions, strict=True)]

    def rate(self, prompt, text):
        if prompt in (RIGHT, WRONG):
            return float(prompt == RIGHT)
        return float(text not in self.wrong if prompt == LATER else len(text) % 2)


def train(rollout, judge, loss="grpo", tokens=6, **config):
    """One step in float64: the trainer, its gradient as one vector, and what the rollout gave."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    found = SimpleNamespace()

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            parts = [p.grad for p in model.parameters()]
            found.gradient = torch.cat([g.flatten() for g in parts]).clone()

    def drawn(prompts, trainer):
        trainer.add_callback(Keep())
        found.out = rollout(prompts, trainer)
        return found.out

    score = GRPOTrainer._generate_and_score_completions

    def scored(self, inputs):
        found.batch = score(self, inputs)
        return found.batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_generate_and_score_completions", scored)
        found.trainer = main_of("grpo/grpo_early_ends.py")(
            steps=1,
            tokens=tokens,
            rollout=drawn_of(rollout, drawn),
            reward=judge,
            model=toy()[0].double(),
            loss_type=loss,
            max_grad_norm=0.0,
            **config,
        )
    found.prompts = found.trainer._logs["prompt"]
    return found


def drawn_of(rollout, call):
    call.ends = rollout.ends
    return call


def rollout_of(**options):
    from csd.integrations.trl import Rollout

    return Rollout(until="all_correct", **dict(audit=0.0) | options)


@pytest.fixture(scope="module")
def full():
    """A step of whole groups."""
    from csd.integrations.trl import Rollout

    return train(Rollout(), Judge())


@pytest.fixture(scope="module")
def early():
    judge = Judge()
    rollout = rollout_of()
    return train(rollout, judge), judge, rollout


def texts(found, prompt):
    """Texts of a prompt's samples, by index."""
    _, tokenizer = toy()
    rows = zip(found.prompts, found.out["completion_ids"], strict=True)
    ids = [tokens for p, tokens in rows if p == prompt]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def apart(a, b):
    return float((a - b).norm() / b.norm())


def undrawn(found):
    return [not any(mask) for mask in found.out["env_mask"]]


def test_the_rest_of_a_right_group_is_not_drawn(full, early):
    found, judge, rollout = early
    missing = undrawn(found)
    for prompt in {*found.prompts}:
        rows = [m for p, m in zip(found.prompts, missing, strict=True) if p == prompt]
        ended = prompt in (RIGHT, LATER)
        assert rows == [False] * FIRST + [ended] * (SIZE - FIRST), prompt
    assert sorted(rollout.ends.sizes) == [FIRST, FIRST, SIZE, SIZE]
    pad = found.trainer.processing_class.pad_token_id
    rows = zip(missing, found.out["completion_ids"], full.out["completion_ids"], strict=True)
    for gone, here, there in rows:
        assert here == ([pad] if gone else there)
    # each completion is rated once, and none that is not there
    drawn = [
        row
        for row in zip(full.prompts, map(tuple, full.out["completion_ids"]), missing, strict=True)
        if not row[2]
    ]
    assert len(judge.asked) == len(drawn) == 24
    counts = [
        0 if gone else len(ids)
        for gone, ids in zip(missing, found.out["completion_ids"], strict=True)
    ]
    assert rollout.tokens == sum(counts)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo"])
def test_its_gradient_is_that_of_the_whole_group(full, early, loss):
    """The loss is one divided by rows; others are divided by the tokens that were drawn."""
    from csd.integrations.trl import Rollout

    whole = full if loss == "grpo" else train(Rollout(), Judge(), loss)
    cut = early[0] if loss == "grpo" else train(rollout_of(), Judge(), loss)
    assert float(whole.gradient.norm()) > 1e-3
    # rows that are padded to other widths are added up in another order
    scale, bound = 1.0, 1e-12
    if loss in ("dapo", "bnpo"):
        items = [float(f.batch["num_items_in_batch"]) for f in (whole, cut)]
        scale = items[0] / items[1]
        assert scale > 1.1
        # TRL divides by them in float32
        bound = 4 * torch.finfo(torch.float32).eps
    assert apart(cut.gradient, scale * whole.gradient) < bound


def test_a_row_that_counts_as_wrong_shows_in_the_gradient(full):
    from csd.integrations.trl.batch import batch_of

    class Counted:
        ends = rollout_of().ends

        def __init__(self):
            self.inner = rollout_of()

        def __call__(self, prompts, trainer):
            out = self.inner(prompts, trainer)
            # as a rollout would that gave an empty text for what it did not draw
            batch_of(trainer).drawn = [True] * len(prompts)
            return out

    class Strict(Judge):
        def rate(self, prompt, text):
            return super().rate(prompt, text) if text else 0.0

    assert apart(train(Counted(), Strict()).gradient, full.gradient) > 0.05


def test_a_later_wrong_sample_is_lost_and_an_audit_finds_it(full):
    judge = Judge(wrong=[texts(full, LATER)[6]])
    from csd.integrations.trl import Rollout

    whole = train(Rollout(), judge)
    assert apart(train(rollout_of(), judge).gradient, whole.gradient) > 0.05
    audited = rollout_of(audit=1.0)
    same = train(audited, judge)
    assert apart(same.gradient, whole.gradient) < 1e-12
    assert audited.ends.sizes == [SIZE] * 4
    assert (audited.ends.mixed, audited.ends.audited) == (1, 2)
    log = same.trainer.state.log_history[0]
    assert log["groups/audited_mixed"] == 0.5 and log["groups/ended_early"] == 0.0


def test_what_is_logged_leaves_them_out(full, early):
    found, judge, _ = early
    log = found.trainer.state.log_history[0]
    drawn = [not m for m in undrawn(found)]
    ids = [c for c, d in zip(found.out["completion_ids"], drawn, strict=True) if d]
    rewards = [judge.rate(*row) for row in judge.asked]
    assert log["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert log["completions/mean_length"] == pytest.approx(sum(map(len, ids)) / len(ids))
    assert log["completions/min_length"] == min(map(len, ids)) > 0
    end = found.trainer.processing_class.eos_token_id
    assert log["completions/clipped_ratio"] == pytest.approx(
        sum(row[-1] != end for row in ids) / len(ids)
    )
    prompts = [p for p, d in zip(found.out["prompt_ids"], drawn, strict=True) if d]
    assert log["num_tokens"] == sum(map(len, ids)) + sum(map(len, prompts))
    assert log["groups/mean_size"] == 6 and log["groups/ended_early"] == 0.5
    # per token, over those that were drawn: the padding token is none
    assert log["entropy"] == pytest.approx(entropy_of(prompts, ids), rel=1e-5)
    lengths = list(found.trainer._logs["extra"]["length"])
    assert [n is not None for n in lengths] == drawn
    advantages = found.trainer._logs["advantages"]
    assert all(a == 0 for a, d in zip(advantages, drawn, strict=True) if not d)


def entropy_of(prompts, completions):
    model, total, count = toy()[0].double(), 0.0, 0
    for prompt, tokens in zip(prompts, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        total += float(torch.distributions.Categorical(logits=logits).entropy().sum())
        count += len(tokens)
    return total / count


def test_evaluation_draws_all(early):
    trainer, rollout = early[0].trainer, rollout_of()
    trainer.model.eval()
    out = rollout([RIGHT] * SIZE, trainer)
    trainer.model.train()
    rows = zip(out["env_mask"], out["completion_ids"], strict=True)
    assert all(len(mask) == len(ids) and all(mask) for mask, ids in rows)


def test_the_example_ends_more_groups_as_it_learns():
    trainer = main_of("grpo/grpo_early_ends.py")(steps=14)
    sizes = [row["groups/mean_size"] for row in trainer.state.log_history if "reward" in row]
    assert len(sizes) == 14 and sizes[0] == SIZE and min(sizes[-5:]) < SIZE


def test_async_rewards_and_conversations_are_rated_once():
    from csd.integrations.trl.batch import Rewards

    asked = []

    async def later(completions, log_extra, unit, **_):
        asked.append((completions, unit))
        log_extra("seen", [c[0]["content"] for c in completions])
        return [None if c[0]["content"] == "b" else 1.0 for c in completions]

    import asyncio

    texts = [[{"role": "assistant", "content": c}] for c in "abcd"]
    logged = {}
    given = dict(completions=texts, unit=[0, 1, 2, 3], log_extra=logged.__setitem__)
    rewards = Rewards(later, 4)
    part = rewards.scorer([True, True, False, False], whole=False)
    assert asyncio.run(part(**given)) == [1.0, None, 0.0, 0.0] and not logged
    part = rewards.scorer([True, True, False, True], whole=True)
    assert asyncio.run(part(**given)) == [1.0, None, 0.0, 1.0]
    assert asked == [(texts[:2], [0, 1]), (texts[3:], [3])]
    assert logged == {"seen": ["a", "b", None, "d"]}


def test_what_cannot_end_early_is_refused(early, monkeypatch):
    import trl

    from csd.integrations.trl import Rollout

    trainer = early[0].trainer
    for options, message in [
        (dict(until="solved"), "until must be None or 'all_correct', got 'solved'"),
        (dict(until="all_correct", first=0), "first must be at least 1, got 0"),
        (dict(until="all_correct", audit=2), r"audit must lie in \[0, 1\], got 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            Rollout(**options)
    with pytest.raises(ValueError, match="first must be less than num_generations=8, got 8"):
        rollout_of(first=8)([RIGHT] * 8, trainer)
    with pytest.raises(NotImplementedError, match="another _generate_and_score_completions"):
        rollout_of()([RIGHT] * 8, trainer)
    for attribute, value in [
        ("beta", 0.04),
        ("_entropy_bonus_enabled", True),
        ("aux_loss_enabled", True),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(trainer, attribute, value)
            with pytest.raises(NotImplementedError, match=attribute):
                rollout_of()([RIGHT] * 8, trainer)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "reward_funcs", [torch.nn.Linear(1, 1)])
        with pytest.raises(NotImplementedError, match="got the reward model"):
            rollout_of()([RIGHT] * 8, trainer)
    monkeypatch.setattr(trl, "__version__", "1.5.0")
    with pytest.raises(ImportError, match=r"trl 1\.6 or newer.*got trl 1\.5\.0"):
        rollout_of()
    Rollout()
