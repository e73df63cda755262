"""No module of csd touches a private attribute of another object of csd, and no two test files
have one name."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import csd

FILES = sorted(Path(csd.__file__).parent.rglob("*.py"))
# public, in spite of its name: the interface of named tuples
NAMED_TUPLE = {"_fields", "_field_defaults", "_replace", "_asdict"}
# private attributes of other libraries' objects, which have no public equivalent
OTHERS = {
    "argparse": {"_option_string_actions"},
    "h11": {"_max_incomplete_event_size"},
    "numba": {
        "_cache",
        "_finalize_dynamic_globals",
        "_finalize_final_module",
        "_finalized",
        "_source_stamp",
    },
    "torch": {
        "_flash_attention_forward",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_scaled_dot_product_flash_attention",
        "_version",
    },
    "transformers": {"_attn_implementation_internal", "_experts_implementation", "_tokenizer"},
    "trl": {"_calculate_rewards", "_metrics", "_tokenize_prompts"},
}


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def other_libraries(tree):
    """Names that a module imports, except csd's."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("csd"):
            names |= {a.asname or a.name for a in node.names}
    return names - {"csd"}


def own_names(body):
    """Private attributes that a class defines: its functions, fields and assignments to `self`."""
    names = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    for node in (n for part in body for n in ast.walk(part)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) == "self" else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def root(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def touches(tree):
    """(line, expression, attribute) of each private attribute of an object that is neither `self`,
    `cls` or `super()`, nor of the class that the code is in, nor a library's module or class."""
    libraries, private = other_libraries(tree), []

    def visit(node, own):
        if isinstance(node, ast.ClassDef):
            own = own_names(node.body)
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of, start = ast.unparse(node.value), root(node.value)
            foreign = isinstance(start, ast.Name) and start.id in libraries
            if of not in ("self", "cls", "super()") and node.attr not in own and not foreign:
                private.append((node.lineno, ast.unparse(node), node.attr))
        for child in ast.iter_child_nodes(node):
            visit(child, own)

    visit(tree, set())
    return [touch for touch in private if touch[2] not in NAMED_TUPLE]


# without one of these a file has no such attribute, and is not parsed
FOREIGN = re.compile(r"(?<!\bself)(?<!\bcls)\._+[a-zA-Z]")


@cache
def touches_of_csd():
    texts = {path: path.read_text() for path in FILES}
    return {path: touches(ast.parse(text)) for path, text in texts.items() if FOREIGN.search(text)}


ALLOWED = set().union(*OTHERS.values())


def test_objects_are_used_by_their_public_attributes():
    private = [
        f"{path}:{line}: {text}"
        for path, each in touches_of_csd().items()
        for line, text, name in each
        if name not in ALLOWED
    ]
    assert not private, "\n".join(private)


def test_exceptions_are_in_use():
    assert {name for each in touches_of_csd().values() for _, _, name in each} >= ALLOWED


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def f(engine): return engine._step", 1),
        ("class A:\n def f(self, other): return other._step", 1),
        ("class A:\n def __init__(self): self._x = 0\n def f(self, other): return other._x", 0),
        ("class A:\n def f(self): return self._x + super()._x", 0),
        ("import torch\ntorch._C._x", 0),
        ("from csd import engine\nengine._x", 1),
        ("def f(pool): return pool._replace(x=1), pool.__dict__", 0),
    ],
)
def test_touches_are_found(code, count):
    assert len(touches(ast.parse(code))) == count


def test_test_files_have_names_of_their_own():
    """pytest imports each by its name alone, so that a second one of a name stops the run."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []
