"""The program of a sample: code blocks of an answer, or a completion behind its prompt.

Blocks are those of CommonMark. A block counts as Python if it compiles, whatever its language is
named.
"""

import ast
import builtins
import re
import symtable
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from textwrap import dedent

from markdown_it import MarkdownIt

ASK = (
    "Complete this Python function. Answer with the whole function in one ```python block.\n\n"
    "```python\n{}\n```"
)

# a line with <answer> would begin a block of HTML, which may contain no fence
_MARKDOWN = MarkdownIt("commonmark").disable(["html_block", "inline"])
# fences that are none to CommonMark: behind text, or in a list whose code is not indented
_LOOSE = re.compile(
    r"(?<![`~])(`{3,}+|~{3,}+)[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True, eq=False)
class _Statement:
    """A statement of a module, and the names of the module that it binds and reads."""

    source: str
    binds: frozenset[str]
    reads: frozenset[str]
    weak: bool  # an import, an assignment of a name to itself, or a function without a body
    future: bool  # from __future__ import
    star: bool  # from module import *


def of_answer(text: str, prompt: str, entry_point: str) -> str:
    """The program of a chat answer, whose thoughts are cut.

    It is the last block that defines `entry_point` by more than a stub, as it is or as the rest of
    the prompt; in front of it, what the prompt defines, and what the block reads from other blocks.
    """
    text = re.sub(r"\r\n?", "\n", text)
    own = _statements(prompt) or _statements(f"{prompt}\n    pass\n")
    before = [s for s in own if entry_point not in s.binds]
    for blocks in ([text, *_blocks(text)], [block for _, block in _LOOSE.findall(text)]):
        parts = [_statements(dedent(block)) for block in blocks]
        continued = (_statements(prompt + block) for block in blocks)
        for mains, given in ((parts, before), (continued, [])):
            for i, main in reversed([*enumerate(mains)]):
                if any(entry_point in s.binds and not s.weak for s in main):
                    others = [s for part in parts[:i] + parts[i + 1 :] for s in part]
                    return _joined([*given, *_read([*given, *main], others), *main])
    return prompt + next(_blocks(text), text)


def _blocks(text: str) -> Iterator[str]:
    for token in _MARKDOWN.parse(text):
        if token.type in ("fence", "code_block"):
            yield token.content


def _statements(source: str) -> list[_Statement]:
    """The statements of a module; none if it does not compile."""
    with warnings.catch_warnings():
        # such as that of an escape sequence, which may be set to be an error
        warnings.simplefilter("ignore")
        try:
            compile(source, "program", "exec", dont_inherit=True)
            lines = source.encode().split(b"\n")
            return [_statement(node, lines) for node in ast.parse(source).body]
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return []


def _statement(node: ast.stmt, lines: list[bytes]) -> _Statement:
    stub = itself = False
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for decorator in node.decorator_list[:1]:
            node.lineno, node.col_offset = decorator.lineno, 0
        stub = not isinstance(node, ast.ClassDef) and all(map(_does_nothing, node.body))
    # as ast.get_source_segment has it, which reads the whole source for each
    own = lines[node.lineno - 1 : node.end_lineno]
    own[-1] = own[-1][: node.end_col_offset]
    own[0] = own[0][node.col_offset :]
    text = b"\n".join(own).decode()
    table = symtable.symtable(text, "program", "exec")
    bound = (s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported())
    binds, reads = frozenset(bound), frozenset(_read_names(table))
    if isinstance(node, ast.Assign):
        itself = bool(binds & reads)
    return _Statement(
        text,
        binds,
        reads,
        weak=stub or itself or isinstance(node, ast.Import | ast.ImportFrom),
        future=isinstance(node, ast.ImportFrom) and node.module == "__future__",
        star=isinstance(node, ast.ImportFrom) and node.names[0].name == "*",
    )


def _does_nothing(node: ast.stmt) -> bool:
    """True for a docstring, `...`, `pass`, an import and `raise NotImplementedError`."""
    if isinstance(node, ast.Raise) and node.exc is not None:
        return ast.unparse(node.exc).startswith("NotImplementedError")
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass | ast.Import | ast.ImportFrom)


def _read_names(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_global() and symbol.is_referenced():
            yield symbol.get_name()
    for child in table.get_children():
        yield from _read_names(child)


def _read(program: list[_Statement], others: list[_Statement]) -> list[_Statement]:
    """Other statements that bind what the program, or one of them, reads.

    Of several that bind a name, it is the last that is not weak.
    """
    known = {*dir(builtins)}.union(*(s.binds for s in program))
    taken = [s for s in others if s.star or s.future]
    names = [name for s in program for name in s.reads]
    while names:
        name = names.pop()
        if name in known:
            continue
        known.add(name)
        found = [s for s in others if name in s.binds]
        if found:
            taken.append(max(reversed(found), key=lambda s: not s.weak))
            names += taken[-1].reads
    return [s for s in others if s in taken]


def _joined(statements: Iterable[_Statement]) -> str:
    """Source of statements, imports from __future__ first."""
    ordered = sorted(statements, key=lambda s: not s.future)
    return "".join(f"{s.source}\n" for s in ordered)
