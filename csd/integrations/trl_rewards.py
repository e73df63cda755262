"""Reward functions that are called once per completion, although it is drawn in parts."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


class Rewards:
    """Rewards of the rows of one batch, by a trainer's reward functions.

    functions: the trainer's. rows: number of completions of its process.
    """

    def __init__(self, functions: list[Callable], rows: int):
        self.parts = [_Part(function, rows) for function in functions]

    def of(self, drawn: list[bool], whole: bool) -> list[Callable]:
        """Wrappers of the functions, which call them only for rows of `drawn` not yet scored.

        whole: True for the last part, with which the columns that the functions log go to the
            trainer.
        """
        return [part.scorer(drawn, whole) for part in self.parts]


class _Part:
    def __init__(self, function: Callable, rows: int):
        self.function = function
        # rows that are not drawn get a reward here, since TRL warns of rows without one
        self.values: list[Any] = [0.0] * rows
        self.known = [False] * rows
        self.logged: dict[str, list] = {}

    def scorer(self, drawn: list[bool], whole: bool) -> Callable:
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
                kept = self.logged.setdefault(column, [None] * len(drawn))
                for i, value in zip(rows, values, strict=True):
                    kept[i] = value

            chosen = {
                name: [value[i] for i in rows]
                if isinstance(value, list) and len(value) == len(drawn) else value
                for name, value in columns.items()
            }  # fmt: skip
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
