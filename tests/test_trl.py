"""TRL's GRPOTrainer with csd drawing the rollouts."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from examples_main import main_of

import csd
from csd.models.demo import toy

pytest.importorskip("trl")
HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")


def forward_logprobs(model, prompt, completion):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(completion)), completion]


@pytest.fixture(scope="module")
def trained():
    """The example, three steps; each call of the rollout with what it drew and the weights then."""
    from grpo_rank import Recorded

    class Watched(Recorded):
        def __call__(self, prompts, trainer):
            out = super().__call__(prompts, trainer)
            state = {k: v.clone() for k, v in trainer.model.state_dict().items()}
            self.drawn[-1] |= {"prompts": prompts, "state": state}
            return out

    rollout, groups = Watched(), []
    run = csd.Engine.run

    def watched(self, jobs, **options):
        groups.append([(tuple(job.prompt), job.samples) for job in jobs])
        return run(self, jobs, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csd.Engine, "run", watched)
        main = main_of("grpo.py")
        trainer = main(steps=3, tokens=12, rollout=rollout)
    return SimpleNamespace(trainer=trainer, drawn=rollout.drawn, groups=groups)


def test_copies_of_a_prompt_are_one_group(trained):
    for groups in trained.groups:
        assert len(groups) == len({prompt for prompt, _ in groups}) == 4
        assert [samples for _, samples in groups] == [range(8)] * 4


def test_seeds_advance_and_samples_differ(trained):
    assert len({d["seed"] for d in trained.drawn}) == len(trained.drawn) == 3
    first = trained.drawn[0]
    rows = {(tuple(p), tuple(c)) for p, c in
            zip(first["prompt_ids"], first["completion_ids"], strict=True)}  # fmt: skip
    assert len(rows) == 32


def test_logprobs_equal_a_separate_forward_with_the_weights_of_the_step(trained):
    """A stale weight would show: the forward after the last step is far from the first calls."""
    model, _ = toy()
    stale = 0.0
    last = trained.drawn[-1]["state"]
    for drawn in trained.drawn:
        columns = [drawn[k] for k in ("prompt_ids", "completion_ids", "logprobs")]
        for prompt, completion, logprobs in zip(*columns, strict=True):
            assert len(logprobs) == len(completion) > 0
            model.load_state_dict(drawn["state"])
            expected = forward_logprobs(model, prompt, completion)
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)
            model.load_state_dict(last)
            other = forward_logprobs(model, prompt, completion)
            stale = max(stale, float((torch.tensor(logprobs) - other).abs().max()))
    assert stale > 0.01


def test_loss_is_finite_and_weights_move(trained):
    log = [row for row in trained.trainer.state.log_history if "loss" in row]
    assert len(log) == 3
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in log)
    start = toy()[0].state_dict()
    assert all((trained.drawn[0]["state"][k] == w).all() for k, w in start.items())
    moved = trained.drawn[1]["state"]
    assert any((moved[k] != w).any() for k, w in start.items())


def test_what_cannot_be_rolled_out_is_refused(trained):
    from csd.integrations.trl import Rollout

    with pytest.raises(ValueError, match="budget must be at least 0, got -1"):
        Rollout(budget=-1)
    trainer = SimpleNamespace(use_vllm=True)
    with pytest.raises(NotImplementedError, match="use_vllm=True"):
        Rollout()(["a"], trainer)
    with pytest.raises(NotImplementedError, match="tools"):
        Rollout()(["a"], SimpleNamespace(use_vllm=False, tools=[print]))
    sharded = torch.nn.Linear(1, 1)
    sharded.weight.ds_id = 0
    accelerator = SimpleNamespace(unwrap_model=lambda m: m)
    trainer = SimpleNamespace(tools=None, accelerator=accelerator, model_wrapped=sharded)
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        Rollout()(["a"], trainer)


def test_processes_share_a_prompts_samples(tmp_path, torchrun):
    """Two processes hold four copies each of one prompt: together they draw samples 0 to 7."""
    done = torchrun("grpo_rank.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)]
    assert [r["world"] for r in ranks] == [2, 2]
    assert ranks[0]["weight"] == ranks[1]["weight"]
    for a, b in zip(ranks[0]["drawn"], ranks[1]["drawn"], strict=True):
        assert a["seed"] == b["seed"]
        assert len({tuple(p) for p in a["prompt_ids"] + b["prompt_ids"]}) == 1
        assert not {tuple(c) for c in a["completion_ids"]} & {tuple(c) for c in b["completion_ids"]}
    first = [r["drawn"][0] for r in ranks]
    model, tokenizer = toy()
    out = csd.generate(
        model, first[0]["prompt_ids"][0], num_samples=8, max_new_tokens=12, temperature=1.0,
        seed=first[0]["seed"], tokenizer=tokenizer,
    )  # fmt: skip
    assert first[0]["completion_ids"] + first[1]["completion_ids"] == out.tokens
    seeds = [d["seed"] for d in ranks[0]["drawn"]]
    assert len(set(seeds)) == len(seeds) == 2
