"""TRL's tools with csd's rollouts: turns, masks, and log-probabilities of several turns."""

import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers.examples_main import main_of
from helpers.oracles.plain_gradients import chances

import csd

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

TEMPERATURE = 0.8


def trained(monkeypatch, **config):
    """Trainer of one step of the example, its batch, its rollout, and the weights before."""
    from csd.integrations.trl import GRPOTrainer, Rollout
    from csd.models.demo import toy

    batches = []
    compute = GRPOTrainer._generate_and_score_completions

    def watched(self, inputs):
        batches.append(compute(self, inputs))
        return batches[-1]

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", watched)
    rollout = Rollout(budget=8, exact=True)
    main = main_of("grpo/grpo_tools.py")
    trainer = main(steps=1, rollout=rollout, temperature=TEMPERATURE, disable_tqdm=True, **config)
    return trainer, batches[0], rollout, toy()[0]


def rows_of(batch):
    """Prompt, completion, mask of the model's tokens and log-probabilities of each row."""
    for i in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i] == 1].tolist()
        there = batch["completion_mask"][i] == 1
        parts = ("completion_ids", "tool_mask", "sampling_per_token_logps")
        tokens, own, logprobs = (batch[name][i][there].tolist() for name in parts)
        yield prompt, tokens, own, logprobs


class Counter:
    """Environment whose answers depend on its calls, and whose every second instance adds a text to
    the prompt."""

    made = 0

    def __init__(self):
        self.number = Counter.made
        Counter.made += 1

    def reset(self, prompt, **columns):
        assert prompt[-1]["role"] == "user" and not columns
        self.answers = []
        return "Go on. " if self.number % 2 else None

    def square(self, digit: int) -> int:
        """Square of a digit and the number of calls before.

        Args:
            digit: from 0 to 9.
        """
        self.answers.append(digit * digit + len(self.answers))
        return self.answers[-1]

    def get_reward(self) -> float:
        return float(len(self.answers))


@pytest.mark.parametrize("environment", [None, Counter], ids=["tools", "environments"])
def test_turns_are_those_of_a_session_and_of_a_plain_loop(monkeypatch, environment):
    Counter.made = 0
    trainer, batch, rollout, model = trained(monkeypatch, environment=environment)
    tokenizer, ends = trainer.processing_class, trainer.generation_config.eos_token_id
    wide = copy.deepcopy(model).double()
    worst = plain = 0.0
    turns, rows = [], []
    sample = {}
    with csd.Engine(model, tokenizer=tokenizer, exact=True) as engine:
        for prompt, tokens, own, logprobs in rows_of(batch):
            # runs of tokens of the model and of the tool
            cuts = [0, *(i for i in range(1, len(own)) if own[i] != own[i - 1]), len(own)]
            spans = [tokens[a:b] for a, b in pairwise(cuts)]
            turns.append(len(spans))
            rows.append([])
            for i, (call, answer) in enumerate(zip(spans[::2], spans[1::2], strict=False)):
                digit = int(tokenizer.decode(call)[-1])
                rows[-1].append(digit**2 + (i if environment else 0))
                assert tokenizer.decode(answer) == f"tool: {rows[-1][-1]}\nassistant: "
            index = sample[tuple(prompt)] = sample.get(tuple(prompt), -1) + 1
            session = engine.session(prompt, num_samples=8, seed=rollout._turns.seed)
            branch = session[index]
            for i, span in enumerate(spans):
                if i % 2:
                    branch.append(span)
                    continue
                session.sample(
                    [branch],
                    max_new_tokens=64 - len(branch.tokens),
                    temperature=TEMPERATURE,
                    end_token_ids=ends,
                )
                assert branch.spans[-1].tokens == span
            want = chances(wide, prompt, [tokens], TEMPERATURE)[0]
            rounded = chances(model, prompt, [tokens], TEMPERATURE)[0]
            model_tokens = torch.tensor(own, dtype=torch.bool)
            drawn = torch.tensor(logprobs)
            assert not drawn[~model_tokens].any()
            worst = max(worst, float((drawn - want)[model_tokens].abs().max()))
            plain = max(plain, float((rounded - want)[model_tokens].abs().max()))
    assert max(turns) == 5 and min(turns) < 5
    assert worst <= 2 * plain
    (log,) = [row for row in trainer.state.log_history if "loss" in row]
    assert log["csd/logp_diff_max"] <= 4 * plain and log["grad_norm"] > 0
    assert log["tools/failure_frequency"] == 0
    if environment:
        called = [row.answers for row in trainer.environments]
        # TRL leaves an answer out that the length has no room for
        assert [own[: len(seen)] for own, seen in zip(called, rows, strict=True)] == rows
        assert log["rewards/Counter/mean"] == sum(map(len, called)) / len(called)
        # two prompts, each with and without the text that environments add
        assert sorted(sample.values()) == [3, 3, 3, 3]


def test_tokens_of_a_tool_that_filters_remove_have_no_loss(monkeypatch):
    """Such a token has log-probability -inf by the filters."""
    config = dict(top_p=0.6, num_iterations=2, gradient_accumulation_steps=2)
    trainer, batch, _, _ = trained(monkeypatch, **config, per_device_train_batch_size=8)
    assert (batch["tool_mask"] == 0).any()
    assert batch["old_per_token_logps"].isfinite().all()
    (log,) = [row for row in trainer.state.log_history if "loss" in row]
    assert all(log[name] == log[name] for name in ("loss", "grad_norm", "csd/logp_diff_max"))
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_what_tools_cannot_be_combined_with_is_refused():
    from csd.integrations.trl import Rollout

    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    own = dict(accelerator=accelerator, model_wrapped=torch.nn.Linear(1, 1), tools=[print])
    with pytest.raises(NotImplementedError, match=r"tools need csd\.integrations\.trl\.GRPOTrain"):
        Rollout()(["a"], SimpleNamespace(**own))
    with pytest.raises(NotImplementedError, match="max_thinking_tokens must be None with tools"):
        Rollout(max_thinking_tokens=1)(["a"], SimpleNamespace(**own, draws_later_turns=True))
    with pytest.raises(RuntimeError, match="next_turn needs a first turn"):
        Rollout().next_turn([[1]], SimpleNamespace(**own))
