"""Early ends of GRPO groups: no further samples if all of the first have the full reward."""

from collections.abc import Callable
from typing import Any

import torch

from csd.engine.results.result import Sample
from csd.integrations.trl.batch import (
    Batch,
    batch_of,
    completion_texts,
    log_lengths,
    score,
    watch_trainers,
)
from csd.kernels.common.noise import prompt_key
from csd.utils.arguments import check_number, check_whole

# the first release of TRL that leaves a reward of None out of its group's mean
OLDEST = "1.6"

# loss terms that give rows with zero advantage a gradient: (trainer's attribute, its arguments,
# the value that turns the term off)
_GRADIENTS = (
    ("beta", "beta", 0),
    ("_entropy_bonus_enabled", "entropy_coef and use_adaptive_entropy", False),
    ("aux_loss_enabled", "router_aux_loss_coef", False),
)

# arguments: row indices, and for each row the samples of its group that draft for it; returns the
# rows' samples
Draw = Callable[[list[int], list[list[Sample]]], list[Sample]]


class EarlyEnds:
    """Draws a trainer's groups in two parts: first samples, then the rest of undecided groups."""

    def __init__(self, first: int | None, full_reward: float, audit: float):
        self.first = None if first is None else check_whole("first", first, 1)
        self.full_reward = check_number("full_reward", full_reward, -float("inf"))
        self.audit = check_number("audit", audit, 0, 1)
        self.sizes: list[int] = []
        self.audited = self.mixed = 0
        _check_version()
        watch_trainers()

    def draw(
        self, trainer: Any, prompts: list, rows: list[list[int]], seed: int, draw: Draw
    ) -> list[Sample | None]:
        """Returns a sample for each of the process's rows, None for those that are not drawn.

        A collective operation of the trainer's processes, which may share groups.
        """
        _check_trainer(trainer)
        size = trainer.num_generations
        first = self._first(size)
        before = trainer.accelerator.process_index * len(rows)
        places = [divmod(before + i, size) for i in range(len(rows))]
        _check_groups(rows, [group for group, _ in places])
        batch = batch_of(trainer)
        drawn: list[Sample | None] = [None] * len(rows)

        def part(chosen: list[int]) -> None:
            known: dict[int, list[Sample]] = {}
            for (group, _), sample in zip(places, drawn, strict=True):
                known.setdefault(group, []).extend([sample] if sample else [])
            samples = draw(chosen, [known[places[i][0]] for i in chosen])
            for i, sample in zip(chosen, samples, strict=True):
                drawn[i] = sample
            batch.drawn = [sample is not None for sample in drawn]

        part([i for i, (_, at) in enumerate(places) if at < first])
        ids = [sample.tokens if sample else [] for sample in drawn]
        texts = completion_texts(trainer, prompts, rows, ids)
        full = self._full(trainer, score(trainer, batch, prompts, texts, ids))
        settled = full.view(-1, size)[:, :first].all(1).tolist()
        audited = [s and self._audits(seed, group) for group, s in enumerate(settled)]
        goes_on = [not s or a for s, a in zip(settled, audited, strict=True)]
        part([i for i, (group, at) in enumerate(places) if at >= first and goes_on[group]])
        batch.whole = True
        batch.on_end = lambda: self._report(trainer, batch, audited, rows, drawn)
        return drawn

    def _first(self, size: int) -> int:
        first = max(size // 2, 1) if self.first is None else self.first
        if first >= size:
            raise ValueError(f"first must be less than num_generations={size}, got {first}")
        return first

    def _full(self, trainer: Any, rewards: torch.Tensor) -> torch.Tensor:
        """Bool [rows], True for rows with the full reward. rewards: [rows, functions]."""
        weighted = (rewards * trainer.reward_weights.to(rewards.device)).nansum(1)
        full = torch.isclose(weighted, torch.full_like(weighted, self.full_reward))
        return full & ~rewards.isnan().all(1)

    def _audits(self, seed: int, group: int) -> bool:
        """True if a group that could end early is drawn completely, with probability `audit`."""
        return prompt_key(seed, [group]) % 2**32 < self.audit * 2**32

    def _report(
        self, trainer: Any, batch: Batch, audited: list[bool], rows: list, drawn: list
    ) -> None:
        """Log group sizes and lengths of the last batch, and add it to the audit's counts."""
        assert batch.scored is not None and batch.drawn_everywhere is not None
        size = trainer.num_generations
        self.sizes = batch.drawn_everywhere.view(-1, size).sum(1).tolist()
        unanimous = self._full(trainer, batch.scored).view(-1, size).all(1).tolist()
        mixed = [not u for u, a in zip(unanimous, audited, strict=True) if a]
        self.audited += len(mixed)
        self.mixed += sum(mixed)
        log = trainer._metrics["train"]
        log["groups/mean_size"].append(sum(self.sizes) / len(self.sizes))
        log["groups/ended_early"].append(sum(n < size for n in self.sizes) / len(self.sizes))
        if mixed:
            log["groups/audited_mixed"].append(sum(mixed) / len(mixed))
        ends = trainer.eos_token_ids
        log_lengths(
            trainer,
            [(len(s.tokens) - sum(s.forced), s.tokens[-1] in ends) for s in drawn if s],
            sum(len(row) for row, s in zip(rows, drawn, strict=True) if s is None),
        )


def _check_version() -> None:
    """Raises ImportError if TRL is too old to leave a row out."""
    import trl
    from packaging.version import Version

    if Version(trl.__version__) < Version(OLDEST):
        raise ImportError(
            f"until needs trl {OLDEST} or newer, which excludes rows without a reward from their "
            f"group's mean, got trl {trl.__version__}"
        )


def _check_trainer(trainer: Any) -> None:
    """Raises NotImplementedError if undrawn rows would have a gradient, or rewards no maximum."""
    for attribute, names, off in _GRADIENTS:
        value = getattr(trainer, attribute, off)
        if value != off:
            raise NotImplementedError(
                "until='all_correct' leaves out rows whose advantage is 0, but these have a "
                f"gradient with {names} of the trainer on ({attribute}={value}): set it to 0"
            )
    for function, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
        if isinstance(function, torch.nn.Module):
            raise NotImplementedError(
                "until='all_correct' needs rewards with a maximum, got the reward model "
                f"{name!r}, which has none"
            )


def _check_groups(rows: list[list[int]], groups: list[int]) -> None:
    for i in range(1, len(rows)):
        if groups[i] == groups[i - 1] and rows[i] != rows[i - 1]:
            raise ValueError(
                "until='all_correct' needs num_generations rows of one prompt after another, got "
                f"two prompts in group {groups[i]}"
            )
