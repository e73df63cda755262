"""TRL's GRPOTrainer with csd drawing the rollouts."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.checks.precision import within_eager
from helpers.examples_main import main_of

import csd
from csd.models.demo import toy

pytest.importorskip("trl")
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

    def watched(self, requests, settings):
        groups.append([(tuple(request.prompt), request.samples) for request in requests])
        return run(self, requests, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csd.Engine, "run", watched)
        main = main_of("grpo/grpo.py")
        trainer = main(steps=3, tokens=12, rollout=rollout)
    return SimpleNamespace(trainer=trainer, drawn=rollout.drawn, groups=groups)


def test_copies_of_a_prompt_are_one_group(trained):
    for groups in trained.groups:
        assert len(groups) == len({prompt for prompt, _ in groups}) == 4
        assert [samples for _, samples in groups] == [range(8)] * 4


def test_seeds_advance_and_samples_differ(trained):
    assert len({d["seed"] for d in trained.drawn}) == len(trained.drawn) == 3
    first = trained.drawn[0]
    rows = {
        (tuple(p), tuple(c))
        for p, c in zip(first["prompt_ids"], first["completion_ids"], strict=True)
    }
    assert len(rows) == 32


def test_logprobs_equal_a_separate_forward_with_the_weights_of_the_step(trained):
    """A stale weight would show: the forward after the last step is far from the first calls."""
    model, _ = toy()
    stale = 0.0
    last = trained.drawn[-1]["state"]
    for drawn in trained.drawn:
        texts = list(zip(drawn["prompt_ids"], drawn["completion_ids"], strict=True))
        assert all(len(completion) > 0 for _, completion in texts)
        logprobs = torch.cat([torch.tensor(x) for x in drawn["logprobs"]])
        model.load_state_dict(drawn["state"])
        exact = copy.deepcopy(model).double()
        expected = [torch.cat([forward_logprobs(m, *t) for t in texts]) for m in (model, exact)]
        within_eager(logprobs, *expected, model.config.intermediate_size)
        model.load_state_dict(last)
        other = torch.cat([forward_logprobs(model, *t) for t in texts])
        stale = max(stale, float((logprobs - other).abs().max()))
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
    with pytest.raises(NotImplementedError, match="use_vllm must be False"):
        Rollout()(["a"], trainer)
    sharded = torch.nn.Linear(1, 1)
    sharded.weight.ds_id = 0
    accelerator = SimpleNamespace(unwrap_model=lambda m: m)
    trainer = SimpleNamespace(tools=None, accelerator=accelerator, model_wrapped=sharded)
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        Rollout()(["a"], trainer)


def test_mixed_precision_with_gradient_checkpointing_is_drawn_by_csd():
    from csd.integrations.trl import Rollout

    rollout = Rollout()
    trainer = main_of("grpo/grpo.py")(
        steps=2, tokens=6, rollout=rollout, bf16=True, gradient_checkpointing=True
    )
    assert rollout.tokens and "forward" in vars(trainer.model)
    assert trainer.state.global_step == 2


def test_a_trainer_whose_head_is_cast_is_refused():
    with pytest.raises((TypeError, ValueError), match=r"lm_head|dtype"):
        main_of("grpo/grpo.py")(steps=1, tokens=4, cast_lm_head_to_fp32=True, bf16=True)


def test_history_is_the_last_epochs_and_changes_nothing(monkeypatch):
    """The example as it stands: it compares completions and losses itself."""
    found = main_of("grpo/grpo_history.py")(
        epochs=2, tokens=6, rates=(1e-2,), histories=(0, 2), prompts=2
    )
    assert [(r["history"], r["epoch"]) for r in found] == [(0, 1), (0, 2), (2, 1), (2, 2)]
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "examples" / "grpo")
    import grpo_history

    kept = {}

    class Watched(grpo_history.Measured):
        def __call__(self, prompts, trainer):
            out = super().__call__(prompts, trainer)
            kept["history"], kept["rows"] = self.history, out["prompt_ids"]
            return out

    monkeypatch.setattr(grpo_history, "Measured", Watched)
    _, _, completions = grpo_history.train(None, 2, 1e-2, 3, 6, 2)
    history = kept["history"]
    assert len(history) == 2
    for row in kept["rows"]:
        earlier = history.of(row)
        assert sorted(e.age for e in earlier) == [0] * 4 + [1] * 4
    last = [c for call in completions[-1:] for c in call]
    newest = [
        e.tokens.tolist()
        for r in {tuple(x) for x in kept["rows"]}
        for e in history.of(r)
        if not e.age
    ]
    assert sorted(last) == sorted(newest)


def test_evaluation_neither_uses_nor_adds(trained):
    from csd.integrations.trl import Rollout

    trainer, rollout = trained.trainer, Rollout(history=1)
    for training, held in ((False, 0), (True, 4)):
        trainer.model.train(training)
        rollout(["Write vowels: ", "Sing: ", "aeiou", "Say it with vowels only. "], trainer)
        assert len(rollout.history) == held


def test_prompts_draft_for_each_other_on_request(trained, monkeypatch):
    from csd.engine.generate import engine_for
    from csd.integrations.trl import Rollout

    run, stats = csd.Engine.run, []

    def watched(self, requests, settings):
        yield from run(self, requests, settings)
        stats.append([request.progress.stats for request in requests])

    monkeypatch.setattr(csd.Engine, "run", watched)
    trainer = trained.trainer
    engine = engine_for(trainer.accelerator.unwrap_model(trainer.model))
    engine.release()
    monkeypatch.setattr(engine.caches, "max_slots", 2)
    prompts = ["Write vowels: ", "Sing: ", "aeiou", "Say it with vowels only. "]
    rollout = Rollout(budget=16, prior=True)
    plain, first, again = (r(prompts, trainer) for r in (Rollout(budget=16), rollout, rollout))
    assert first["completion_ids"] == plain["completion_ids"]
    assert again["completion_ids"] != plain["completion_ids"]
    alone, learnt, later = ([s.prior_tokens for s in call] for call in stats)
    assert alone == learnt == [0] * 4 and min(later) > 0
    # weights halve in each epoch; those of a prior that is passed are its owner's
    own = Rollout(prior=csd.Prior(learn=True))
    rollouts = [rollout, own]
    for r in rollouts:
        r(prompts, trainer)
    before = [r.prior.table.entry_total.clone() for r in rollouts]
    monkeypatch.setattr(trainer.state, "epoch", (trainer.state.epoch or 0) + 2)
    monkeypatch.setattr(csd.Prior, "add", lambda *answers: None)
    for r in rollouts:
        r(prompts, trainer)
    assert torch.equal(rollout.prior.table.entry_total, before[0] >> 2)
    assert torch.equal(own.prior.table.entry_total, before[1])
    with pytest.raises(TypeError, match="prior must be a csd"):
        Rollout(prior=3)


def test_processes_share_a_prompts_samples(tmp_path, torchrun):
    """Two processes hold four copies each of one prompt: together they draw samples 0 to 7."""
    done = torchrun(Path(__file__).with_name("grpo_rank.py"), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)]
    # either has what both drew, in the order of sample indices
    assert ranks[0]["history"] == ranks[1]["history"]
    prompt, newest = ranks[0]["history"]
    of_both = [
        c
        for r in ranks
        for d in r["drawn"]
        for p, c in zip(d["prompt_ids"], d["completion_ids"], strict=True)
        if p == prompt
    ]
    assert len(newest) == 8 and sorted(newest) == sorted(of_both)
    assert [r["world"] for r in ranks] == [2, 2]
    assert ranks[0]["weight"] == ranks[1]["weight"]
    for a, b in zip(ranks[0]["drawn"], ranks[1]["drawn"], strict=True):
        assert a["seed"] == b["seed"]
        assert len({tuple(p) for p in a["prompt_ids"] + b["prompt_ids"]}) == 1
        assert not {tuple(c) for c in a["completion_ids"]} & {tuple(c) for c in b["completion_ids"]}
    first = [r["drawn"][0] for r in ranks]
    model, tokenizer = toy()
    out = csd.generate(
        model,
        first[0]["prompt_ids"][0],
        num_samples=8,
        max_new_tokens=12,
        temperature=1.0,
        seed=first[0]["seed"],
        tokenizer=tokenizer,
    )
    assert first[0]["completion_ids"] + first[1]["completion_ids"] == out.tokens
    seeds = [d["seed"] for d in ranks[0]["drawn"]]
    assert len(set(seeds)) == len(seeds) == 2
    # of a group that ends with its first 5 samples, one process has four and the other one
    early = [r["early"] for r in ranks]
    assert early[0]["logged"] == early[1]["logged"]
    assert early[0]["history"] == early[1]["history"]
    for (prompt, here), (same, there), size in zip(
        *(e["sizes"] for e in early), early[0]["logged"], strict=True
    ):
        assert prompt == same and here + there == size
        assert (here, there) == ((4, 4) if prompt == "Sing: " else (4, 1))
    assert len({prompt for prompt, _ in early[0]["sizes"]}) == 4


def test_what_a_spent_budget_of_thought_forces_bears_no_loss(monkeypatch):
    from trl import GRPOTrainer

    from csd.integrations.trl import Rollout

    drawn, masks = [], []

    class Thinking(Rollout):
        def __call__(self, prompts, trainer):
            drawn.append(super().__call__(prompts, trainer))
            return drawn[-1]

    compute = GRPOTrainer._generate_and_score_completions

    def watched(self, inputs):
        out = compute(self, inputs)
        masks.append(out["tool_mask"])
        return out

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", watched)
    # a space begins a thought, and an exclamation mark ends it
    rollout = Thinking(max_thinking_tokens=2, thinking_tags=(" ", "!"))
    trainer = main_of("grpo/grpo.py")(steps=1, tokens=8, rollout=rollout)
    end = trainer.processing_class.convert_tokens_to_ids("!")
    (found,), (mask,) = drawn, masks
    assert sum(0 in row for row in found["env_mask"]) > 0
    for i, (tokens, kept) in enumerate(
        zip(found["completion_ids"], found["env_mask"], strict=True)
    ):
        assert len(kept) == len(tokens) and {*kept} <= {0, 1}
        assert {tokens[j] for j, k in enumerate(kept) if not k} <= {end}
        assert mask[i, : len(kept)].tolist() == kept
    assert math.isfinite(trainer.state.log_history[0]["loss"])
    with pytest.raises(ValueError, match="max_thinking_tokens must be at least 0"):
        Rollout(max_thinking_tokens=-1)
