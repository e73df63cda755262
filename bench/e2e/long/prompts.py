"""Prompts whose complete answers fit a limit: as many problems or functions as it holds.

A prompt has several items, each with an answer of about EACH tokens, so that the complete answer is
shorter than the limit that it is drawn with.
"""

import json
from pathlib import Path

from bench.e2e.cpu import PROBLEMS

FOLDER = Path(__file__).parents[2] / "prompts"
# tokens of a small model's answer to one item
EACH = {"worked problems": 130, "programs": 150, "rewriting": 120}
# share of the limit that the expected answers fill
FILLED = 0.3


def prompt(task: str, limit: int, turn: int) -> str:
    """Returns a prompt of `task`. turn: index of its first item, so that prompts differ."""
    items = ITEMS[task]()
    count = min(max(int(FILLED * limit / EACH[task]), 1), len(items))
    chosen = [items[(turn + i) % len(items)] for i in range(count)]
    return ASK[task](chosen, limit < EACH[task])


def _lines(name: str, field: str) -> list[str]:
    return [json.loads(line)[field] for line in (FOLDER / name).read_text().splitlines()]


def _numbered(items: list[str]) -> str:
    return "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def _worked(items: list[str], short: bool) -> str:
    if len(items) > 1:
        return f"Solve these {len(items)} problems one after another.\n{_numbered(items)}"
    return f"{items[0]} {'Answer in one sentence.' if short else 'Think step by step.'}"


def _programs(items: list[str], short: bool) -> str:
    if len(items) > 1:
        return f"Do these {len(items)} tasks one after another.\n{_numbered(items)}"
    return f"{items[0]}{' Give only the code.' if short else ''}"


def _rewriting(items: list[str], short: bool) -> str:
    code, whole = "\n\n\n".join(items), "Give the whole code and nothing else."
    asked = "Rename the function" if short else "Add a docstring to each function"
    return f"{asked}. Keep the code otherwise as it is. {whole}\n\n```python\n{code}\n```"


ITEMS = {
    "worked problems": lambda: PROBLEMS + _lines("worked.jsonl", "prompt"),
    "programs": lambda: _lines("code.jsonl", "prompt"),
    "rewriting": lambda: _lines("functions.jsonl", "code"),
}
ASK = {"worked problems": _worked, "programs": _programs, "rewriting": _rewriting}
