"""A batch of TRL's GRPO trainer in which some completions are not drawn.

TRL passes only the prompts to a `rollout_func`, and requires a completion for each. Two methods of
its trainer are therefore wrapped, for all trainers of the process; they behave as before if every
completion is drawn. A completion that is not drawn is one padding token with a loss mask of 0. Its
reward is NaN, which TRL leaves out of means and deviations; the lengths that TRL has logged are
replaced by those without it.

A batch is drawn in parts, and reward functions are called once per completion (`Rewards`).
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch


class Rewards:
    """Rewards of the rows of one batch, by one of a trainer's reward functions.

    rows: number of completions of the trainer's process.
    """

    def __init__(self, function: Callable, rows: int):
        self.function = function
        # rows that are not drawn get a reward here, since TRL warns of rows without one
        self.values: list[Any] = [0.0] * rows
        self.known = [False] * rows
        self.logged: dict[str, list] = {}

    def scorer(self, drawn: list[bool], whole: bool) -> Callable:
        """Wrapper of the function, which calls it only for rows of `drawn` not yet scored.

        whole: True for the last part, with which the columns that the function logs go to the
            trainer.
        """

        def finish(log: Callable, rows: list[int], rewards: Any) -> list:
            for i, reward in zip(rows, rewards, strict=True):
                self.values[i], self.known[i] = reward, True
            if whole:
                for column, values in self.logged.items():
                    log(column, values)
            return self.values

        def select(columns: dict[str, Any]) -> tuple[Callable, list[int], dict[str, Any]]:
            rows = [i for i, wanted in enumerate(drawn) if wanted and not self.known[i]]
            log = columns["log_extra"]

            def keep(column: str, values: list) -> None:
                column_values = self.logged.setdefault(column, [None] * len(drawn))
                for i, value in zip(rows, values, strict=True):
                    column_values[i] = value

            chosen = {
                name: [value[i] for i in rows]
                if isinstance(value, list) and len(value) == len(drawn)
                else value
                for name, value in columns.items()
            }
            return log, rows, chosen | {"log_extra": keep}

        if _is_async(self.function):

            async def score_later(**columns: Any) -> list:
                log, rows, chosen = select(columns)
                return finish(log, rows, await self.function(**chosen) if rows else [])

            return score_later

        def score(**columns: Any) -> list:
            log, rows, chosen = select(columns)
            return finish(log, rows, self.function(**chosen) if rows else [])

        return score


def _is_async(function: Callable) -> bool:
    while isinstance(function, partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - what it is, not whether
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


# batch of the trainer that is drawing
_batch: ContextVar["Batch | None"] = ContextVar("_batch", default=None)


@dataclass(slots=True)
class Batch:
    """Rows of a trainer's process, with one completion each, which are drawn in parts."""

    inputs: list[dict[str, Any]]  # columns of the dataset
    drawn: list[bool] | None = None  # by row: drawn so far; None: all are, in one part
    whole: bool = False  # True after the last part
    rewards: list[Rewards] | None = None  # by each of the trainer's functions
    # rows of all processes
    scored: torch.Tensor | None = None  # [rows, functions], NaN for rows that are not drawn
    drawn_everywhere: torch.Tensor | None = None  # [rows] bool
    on_end: Callable[[], None] | None = None


def batch_of(trainer: Any) -> Batch:
    """Returns the batch whose completions `trainer` is generating."""
    batch = _batch.get()
    if batch is None:
        raise _overridden(trainer, "_generate_and_score_completions")
    return batch


def score(trainer: Any, batch: Batch, prompts: list, completions: list, ids: list) -> torch.Tensor:
    """Rewards of the rows drawn so far: [rows of all processes, functions], NaN for others.

    A collective operation of the trainer's processes.
    """
    batch.scored = None
    trainer._calculate_rewards(batch.inputs, prompts, completions, ids)
    if batch.scored is None:
        raise _overridden(trainer, "_calculate_rewards")
    return batch.scored


def _overridden(trainer: Any, name: str) -> NotImplementedError:
    return NotImplementedError(
        "until needs a trainer that draws and scores as GRPOTrainer does, but "
        f"{type(trainer).__name__} has another {name}"
    )


@cache
def watch_trainers() -> None:
    """Wrap the two methods of TRL's `GRPOTrainer`, once per process."""
    from trl import GRPOTrainer

    draw, rate = GRPOTrainer._generate_and_score_completions, GRPOTrainer._calculate_rewards

    @wraps(draw)
    def drawing(self: Any, inputs: list) -> dict:
        batch = Batch(inputs)
        token = _batch.set(batch)
        try:
            out = draw(self, inputs)
        finally:
            _batch.reset(token)
        if batch.on_end is not None:
            batch.on_end()
        return out

    @wraps(rate)
    def rating(self: Any, inputs: list, *completions: Any) -> torch.Tensor:
        from accelerate.utils import gather

        batch = _batch.get()
        if batch is None or batch.drawn is None:
            return rate(self, inputs, *completions)
        functions = self.reward_funcs
        if batch.rewards is None:
            batch.rewards = [Rewards(function, len(inputs)) for function in functions]
        self.reward_funcs = [each.scorer(batch.drawn, batch.whole) for each in batch.rewards]
        try:
            rewards = rate(self, inputs, *completions)
        finally:
            self.reward_funcs = functions
        batch.drawn_everywhere = gather(torch.tensor(batch.drawn, device=rewards.device))
        batch.scored = rewards.masked_fill(~batch.drawn_everywhere[:, None], torch.nan)
        return batch.scored

    setattr(GRPOTrainer, draw.__name__, drawing)
    setattr(GRPOTrainer, rate.__name__, rating)


def completion_texts(trainer: Any, prompts: list, rows: list, ids: list[list[int]]) -> list:
    """Completions in the form that reward functions take: texts, or lists of messages."""
    from trl.chat_template_utils import parse_response
    from trl.data_utils import is_conversational

    reader = trainer.processing_class
    # the trainer decodes completions without their prompts, and rewards are of these texts
    if not is_conversational({"prompt": prompts[0]}):
        return reader.batch_decode(ids, skip_special_tokens=True)
    tokenizer = getattr(reader, "tokenizer", reader)
    asked = ("response_template", "response_schema")
    if any(getattr(tokenizer, name, None) is not None for name in asked):
        return [
            [parse_response(tokenizer, tokens, prefix=row)] if tokens else []
            for row, tokens in zip(rows, ids, strict=True)
        ]
    texts = reader.batch_decode(ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts]


def log_lengths(trainer: Any, lengths: list[tuple[int, bool]], undrawn_prompts: int) -> None:
    """Replace the lengths that the trainer has logged of its last batch.

    lengths: for each completion that this process drew, the number of tokens with a loss, and True
        if the last token is an end token. undrawn_prompts: prompt tokens of the other rows.
    """
    from accelerate.utils import gather_object

    every = gather_object([(lengths, undrawn_prompts)])
    drawn = [row for rows, _ in every for row in rows]
    log = trainer._metrics["train"]
    trainer.state.num_input_tokens_seen -= sum(tokens for _, tokens in every)
    log["num_tokens"] = [trainer.state.num_input_tokens_seen]
    ended = [length for length, ends in drawn if ends] or [0]
    log["completions/clipped_ratio"][-1] = sum(not ends for _, ends in drawn) / len(drawn)
    for name, values in (("", [length for length, _ in drawn]), ("terminated_", ended)):
        log[f"completions/mean_{name}length"][-1] = sum(values) / len(values)
        log[f"completions/min_{name}length"][-1] = float(min(values))
        log[f"completions/max_{name}length"][-1] = float(max(values))
