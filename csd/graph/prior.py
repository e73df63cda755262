"""A prior: n-grams of a model's answers to other prompts, which draft for every prompt.

Its table has the contexts of PRIOR_CONFIG: 1 and 2 tokens, with the 8 heaviest tokens that followed
them. An answer is inserted like a past sample (`csd/graph/history.py`), from its first token on,
which follows the prompt's last ones. `csd/kernels/draft/` defines how drafts read it.

`Engine._begin_call` copies it to a part of the drafter's table (`ConsensusGraph.use_prior`). A
group reads the part of its request (`Prefill.begin`). `Scheduler.learn` adds answers that ended.

The file is in the safetensors format: the used entries of the table, and as metadata the size of
the vocabulary, the digest of the tokenizer and the number of tokens learnt.
"""

import json
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad

from csd.graph.history import InsertRows, PastSample, history_rows
from csd.kernels.backends import choose
from csd.state.context_table import MAX_TOTAL, PRIOR_KEY, WEIGHT_ONE, GraphConfig, Table
from csd.state.record import declared
from csd.utils.arguments import check_flag, check_whole
from csd.utils.check import shown
from csd.utils.files import WholeFile, check_regular

PRIOR_CONFIG = GraphConfig(orders=(1, 2), successors=8, capacity=1 << 16)
# capacities of a prior's table
MIN_CONTEXTS, DEFAULT_CONTEXTS, MAX_CONTEXTS = 1 << 10, 1 << 16, 1 << 17
# weights below 2^31 have none left after these
MOST_HALVINGS = 30
# rows of one insert
PIECE = 512
FORMAT = "csd.prior/1"
# fields of the entries in a file, with their columns
_STORED = {
    "entry_tokens": PRIOR_CONFIG.context,
    "entry_total": None,
    "succ_token": PRIOR_CONFIG.successors,
    "succ_weight": PRIOR_CONFIG.successors,
}


class Prior:
    """N-grams of a model's answers to other prompts, from which every prompt of a call drafts.

    Tokens never depend on it. It may be read by several engines at once.

    learn: whether calls that read the prior add their answers to it, each prompt's when its last
    sample has ended. contexts: capacity of the table, a power of two from 2^10 to 2^17; when it is
    full, new contexts replace light ones. tokenizer: as in `csd.generate`, by which the prior is
    checked to be used with the vocabulary that it was made for.
    """

    def __init__(
        self, *, learn: bool = False, contexts: int = DEFAULT_CONTEXTS, tokenizer: Any = None
    ):
        """Raises ValueError or TypeError for an invalid argument."""
        self.learn = check_flag("learn", learn)
        contexts = check_whole("contexts", contexts, MIN_CONTEXTS, MAX_CONTEXTS)
        if contexts & (contexts - 1):
            raise ValueError(f"contexts must be a power of two, got {contexts}")
        self.config = replace(PRIOR_CONFIG, capacity=contexts)
        self.table = Table.empty(self.config)
        self.tokens = 0  # learnt, over all answers
        self.version = 0  # changes of the table
        self.digest = None if tokenizer is None else tokenizer_digest(tokenizer)
        self.vocab = 0  # the largest token id, plus one
        self._lock = threading.Lock()

    @property
    def contexts(self) -> int:
        """Number of contexts in the table."""
        return int((self.table.entry_group == PRIOR_KEY).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return sum(getattr(self.table, name).nbytes for name in declared(Table))

    def __repr__(self) -> str:
        return f"Prior({self.contexts} contexts of {self.tokens} tokens, learn={self.learn})"

    def add(
        self,
        prompt: Sequence[int],
        samples: Iterable[Sequence[int]],
        top: Iterable[Sequence] | None = None,
    ) -> None:
        """Learn answers to a prompt. All are token ids.

        top: for each sample the model's likeliest tokens and their probabilities at each position,
        as in a trace.

        Raises ValueError for a token id outside [0, 2^31).
        """
        answers = [*samples]
        tops = [None] * len(answers) if top is None else [*top]
        past = [
            PastSample.of(_ids("samples", tokens), of_answer)
            for tokens, of_answer in zip(answers, tops, strict=True)
        ]
        context = _ids("prompt", prompt)[-self.config.context :]
        # without the rows of the context of any token
        rows = [history_rows(context, x, self.config)[: len(x)] for x in past if len(x)]
        if rows:
            joined = InsertRows.join(rows)
            vocab = 1 + max(int(joined.token.max()), *context, 0)
            self._insert([(joined, self.config.orders)], sum(map(len, past)), vocab)

    def add_successors(self, token: torch.Tensor, probability: torch.Tensor) -> None:
        """Learn the likeliest tokens [V, K] int32 behind each of the tokens 0 .. V - 1, alone, with
        their probabilities [V, K], as one observation of each."""
        size, E = token.shape[0], self.config.successors
        weight = (probability[:, :E] * WEIGHT_ONE).int()
        likely, room = torch.where(weight > 0, token[:, :E], -1), (0, E - weight.shape[1])
        alone = torch.arange(size, dtype=torch.int32)[:, None]
        entries = {
            "entry_tokens": pad(alone, (0, self.config.context - 1), value=-1),
            "entry_total": torch.full((size,), WEIGHT_ONE, dtype=torch.int32),
            "succ_token": pad(likely, room, value=-1),
            "succ_weight": pad(weight, room),
        }
        self._enter(entries, 0, max(size, 1 + int(token.max())))

    def decay(self, halvings: int = 1) -> None:
        """Halve all weights, so that later answers count more; contexts without weight go."""
        check_whole("halvings", halvings, 1, MOST_HALVINGS)
        with self._lock:
            table = self.table
            for x in (table.entry_total, table.succ_weight):
                x >>= halvings
            table.succ_token.masked_fill_(table.succ_weight == 0, -1)
            table.entry_group.masked_fill_((table.succ_weight == 0).all(1), -1)
            self.version += 1

    def merge(self, other: "Prior") -> None:
        """Add the contexts and weights of another prior.

        Raises ValueError for one of another tokenizer.
        """
        self.check(other.digest, max(self.vocab, other.vocab), "other")
        with other._lock:
            entries, tokens, vocab = _entries(other.table), other.tokens, other.vocab
        self._enter(entries, tokens, vocab)
        self.digest = self.digest or other.digest

    def check_use(self, tokenizer: Any, vocab: int) -> None:
        """Raises the errors of `check` for a model's tokenizer and vocabulary.

        A prior that learns is from then on one of this tokenizer.
        """
        needed = tokenizer is not None and (self.learn or self.digest is not None)
        digest = tokenizer_digest(tokenizer) if needed else None
        self.check(digest, vocab)
        if self.learn and digest is not None:
            self.digest = digest

    def check(self, digest: str | None, vocab: int, name: str = "prior") -> None:
        """Raises ValueError if the prior was made for another tokenizer, or a larger vocabulary."""
        if digest is not None and self.digest is not None and digest != self.digest:
            raise ValueError(
                f"{name} must be a prior of the same tokenizer, got one of another: build it from "
                "answers of this model's tokenizer (`csd prior`)"
            )
        if self.vocab > vocab:
            raise ValueError(
                f"{name} must have token ids below {vocab}, the model's vocabulary, got "
                f"{self.vocab - 1}"
            )

    def copy_to(self, table: Table) -> int:
        """Copies the table to one of equal sizes on any device; returns its version."""
        with self._lock:
            table.copy_(self.table)
            return self.version

    def save(self, path: str | PathLike[str]) -> None:
        """Write the prior to a file, whole or not at all; of several saves, the last one's stays.

        Raises OSError, which names the file.
        """
        from safetensors.torch import save

        with self._lock:
            tensors = {name: x.contiguous() for name, x in _entries(self.table).items()}
            about = {
                "format": FORMAT,
                "contexts": str(self.config.capacity),
                "tokens": str(self.tokens),
                "vocab": str(self.vocab),
                "tokenizer": self.digest or "",
            }
        with WholeFile(Path(path), alone=False) as file:
            file.write([save(tensors, about)])

    @classmethod
    def load(cls, path: str | PathLike[str], *, learn: bool = False) -> "Prior":
        """Read a file of `save`.

        Raises OSError, and ValueError for a file that is none, with the file and the reason.
        """
        check_regular(path)
        # the library's own errors of files have neither number nor name
        with open(path, "rb"):
            pass
        try:
            about, tensors = _read(Path(path))
            made = cls(learn=learn, contexts=about["contexts"])
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(path)!r} must be a file of csd.Prior.save: {error}"
            ) from None
        made._enter(tensors, about["tokens"], about["vocab"])
        made.digest = about["tokenizer"] or None
        return made

    def _enter(self, entries: dict[str, torch.Tensor], tokens: int, vocab: int) -> None:
        """Adds entries, shorter contexts first."""
        context, total, token, weight = (entries[name].numpy() for name in _STORED)
        rows, length = InsertRows(context, token, weight, total), (context >= 0).sum(1)
        # the rows' shorter contexts are entries of their own
        parts = ((rows[length == order], (order,)) for order in self.config.orders)
        self._insert(parts, tokens, vocab)

    def _insert(
        self, parts: Iterable[tuple[InsertRows, tuple[int, ...]]], tokens: int, vocab: int
    ) -> None:
        """Inserts rows, with the orders of the contexts that each part of them updates."""
        groups = torch.tensor([PRIOR_KEY])
        with self._lock:
            for rows, orders in parts:
                for first in range(0, len(rows), PIECE):
                    piece = rows[first : first + PIECE]
                    piece.insert(self.table, _graph_insert(), PRIOR_KEY, 0, groups, orders)
            self.table.succ_source.zero_()
            self.tokens, self.vocab = self.tokens + tokens, max(self.vocab, vocab)
            self.version += 1


# digests by tokenizer: making one takes a tenth of a second
_digests: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def tokenizer_digest(tokenizer: Any) -> str | None:
    """Digest of a tokenizer's tokens and ids; None for an object that does not list them."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    if tokenizer not in _digests:
        items = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        _digests[tokenizer] = sha256(json.dumps(items).encode()).hexdigest()
    return _digests[tokenizer]


def is_prior(path: str | PathLike[str]) -> bool:
    """True if a file begins like one of `Prior.save`: with the length of a JSON header.

    Raises OSError, and ValueError for a pipe, whose beginning cannot be read twice.
    """
    check_regular(path)
    with open(path, "rb") as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{"


@cache
def _graph_insert() -> Any:
    return choose(None, torch.device("cpu"), torch.float32).graph_insert


def _ids(name: str, tokens: Sequence[int]) -> list[int]:
    ids = [int(t) for t in tokens]
    if ids and not (min(ids) >= 0 and max(ids) < 1 << 31):
        raise ValueError(
            f"{name} must have token ids from 0 to {(1 << 31) - 1}, got {min(ids)} to {max(ids)}"
        )
    return ids


def _entries(table: Table) -> dict[str, torch.Tensor]:
    """The used entries of a table, in its order."""
    used = (table.entry_group == PRIOR_KEY).nonzero()[:, 0]
    return {name: getattr(table, name)[used] for name in _STORED}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and checked tensors of a file. Raises ValueError with the reason."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if about.get("format") != FORMAT:
        raise ValueError(f"its format must be {FORMAT!r}, got {shown(about.get('format'))}")
    sizes: dict[str, Any] = {"tokenizer": about.get("tokenizer", "")}
    for name in ("contexts", "tokens", "vocab"):
        text = about.get(name, "")
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise ValueError(f"{name} must be a whole number, got {shown(text)}")
        sizes[name] = int(text)
    if sizes["vocab"] > 1 << 31:
        raise ValueError(f"vocab must be at most {1 << 31}, got {sizes['vocab']}")
    _check_entries(tensors, sizes)
    return sizes, tensors


def _check_entries(tensors: dict[str, torch.Tensor], sizes: dict[str, Any]) -> None:
    if tensors.keys() != _STORED.keys():
        raise ValueError(f"tensors must be {', '.join(_STORED)}, got {', '.join(sorted(tensors))}")
    count = tensors["entry_total"].shape[0] if tensors["entry_total"].dim() == 1 else 0
    for name, columns in _STORED.items():
        x, shape = tensors[name], (count,) if columns is None else (count, columns)
        if x.dtype != torch.int32 or x.shape != shape:
            raise ValueError(f"{name} must be int32 {shape}, got {x.dtype} {tuple(x.shape)}")
    if count > sizes["contexts"]:
        raise ValueError(f"it must have at most {sizes['contexts']} contexts, got {count}")
    if not count:
        return
    for name in ("entry_tokens", "succ_token"):
        x = tensors[name]
        if x.min() < -1 or x.max() >= sizes["vocab"]:
            raise ValueError(
                f"{name} must have token ids below {sizes['vocab']}, got {int(x.min())} to "
                f"{int(x.max())}"
            )
    tokens = tensors["entry_tokens"]
    if (tokens[:, 0] < 0).any() or ((tokens[:, 1:] >= 0) & (tokens[:, :-1] < 0)).any():
        raise ValueError("entry_tokens must have -1 only behind a context's tokens")
    weight, total = tensors["succ_weight"], tensors["entry_total"]
    if weight.min() < 0 or total.min() < 0 or total.max() > MAX_TOTAL:
        raise ValueError(f"weights must lie in [0, {MAX_TOTAL}]")
    if (weight.long().sum(1) > total).any():
        raise ValueError("a context's weights must sum to at most its total")
