"""Texts of the quality table: prose, chats and code, of this repository and of Python."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PROSE = ("DESIGN.md", "docs/verifiers.md", "docs/exact.md", "docs/graphs.md", "docs/shared_rows.md")
CHATS = ("writing", "medical", "commonsense", "worked", "code", "rewrite")
MODULES = ("heapq", "json.decoder", "textwrap", "bisect", "statistics", "difflib")


def texts(tokenizer: Any, tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Yield kind and token ids of each text, at most `tokens` of each.

    A chat is one of the benchmarks' prompts in the model's template, answered by prose.
    """
    prose = [(ROOT / name).read_text() for name in PROSE]
    for text in prose:
        yield "prose", tokenizer(text).input_ids[:tokens]
    for i, name in enumerate(CHATS):
        ids: list[int] = []
        lines = (ROOT / f"bench/prompts/{name}.jsonl").read_text().splitlines()
        for j, line in enumerate(lines):
            question = next(iter(json.loads(line).values()))
            answer = prose[(i + j) % len(prose)][600 * j : 600 * (j + 1)]
            ids += _turns(tokenizer, str(question), answer)
        yield "chat", ids[:tokens]
    for name in MODULES:
        module = __import__(name, fromlist=["_"])
        yield "code", tokenizer(inspect.getsource(module)).input_ids[:tokens]


def _turns(tokenizer: Any, question: str, answer: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(f"{question}\n{answer}\n").input_ids)
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    encoded = tokenizer.apply_chat_template(chat)
    return list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)
