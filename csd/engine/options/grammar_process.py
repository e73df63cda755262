"""Compilation of a stranger's grammar in a process that ends it.

llguidance has limits of its own, but intersections of patterns take exponential time before they
apply: a schema of 1,400 characters takes minutes and gigabytes.
"""

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from csd.engine.options import LogitOptions
from csd.engine.options.grammar import GRAMMARS, Recent, source
from csd.utils.arguments import checked
from csd.utils.isolated_python import environment

SECONDS = 5  # of the CPU
MEMORY = 2 << 30  # bytes of addresses
WAIT = 30  # seconds, on a machine that others use too
COMPILED = 77  # exit status of a process that has compiled the grammar, valid or not

_CODE = f"""
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
except ImportError:
    pass
from llguidance import LLMatcher
LLMatcher.validate_grammar_with_warnings(sys.stdin.buffer.read().decode())
sys.exit({COMPILED})
"""

_compiled = Recent()


def check_compiles(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the argument, for a grammar that takes too long or panics."""
    grammar = source({name: checked(LogitOptions, name, arguments.get(name)) for name in GRAMMARS})
    if grammar is None:
        return
    name, text = grammar
    digest = hashlib.sha256(text.encode()).digest()
    if digest in _compiled:
        return
    status = None
    with suppress(subprocess.TimeoutExpired):
        status = subprocess.run(
            [sys.executable, "-P", "-c", _CODE],
            input=text.encode(),
            timeout=WAIT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).returncode
    if status != COMPILED:
        raise ValueError(
            f"{name} must compile within {SECONDS} seconds and {MEMORY >> 30} GB: use fewer or "
            "shorter patterns"
        )
    _compiled.add(digest)
