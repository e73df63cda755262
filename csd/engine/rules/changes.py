"""Changes of a step's rows of logits before verification, by the options of its samples.

A call without such options has no `Changes`. The rules are stored in tensors, so a step that only
uses these is captured like any other; functions on the host need a step that reads the device.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import Any

import torch

from csd.engine.requests.request import Request
from csd.engine.requests.slot_edits import Refill, write_rows
from csd.engine.rules.functions import apply_functions
from csd.engine.rules.grammar import Grammars
from csd.engine.rules.tables import RuleSizes, WordTree, asked_by, set_of, sizes_of, write_sets
from csd.kernels.ops import Ops
from csd.kernels.verify.rules.finish import finish_rows, keep_full
from csd.kernels.verify.rules.rows import change_rows, only
from csd.state.logit_rules import RuleKinds, Rules
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict

LOG = logging.getLogger("csd")

_SERIAL = count()


@dataclass(slots=True)
class Changes:
    """The rules of a call's samples, and the verification of the changed rows."""

    rules: Rules
    sizes: RuleSizes
    ones: torch.Tensor  # [S] float64
    zeros: torch.Tensor  # [S] int32
    asked: RuleKinds = field(default_factory=RuleKinds)
    sets: dict[tuple, int] = field(default_factory=dict)
    owners: list[Request | None] = field(default_factory=list)  # of each slot
    serial: int = field(default_factory=lambda: next(_SERIAL))
    static: bool = False  # whether the host must not read the device
    grammars: Grammars | None = None
    teacher_forced: bool = False  # whether tokens are input rather than drawn

    @classmethod
    def of_call(
        cls,
        requests: Sequence[Request],
        slots: Slots,
        vocab: int,
        before: "Changes | None",
        static: bool,
        tokenizer: Any = None,
    ) -> "Changes | None":
        """Changes of a call, in the tensors of `before` if they fit; None without rules."""
        asked = asked_by(requests)
        if asked is None:
            return None
        # samples without rules get a set of neutral ones
        params = {set_of(r.params): r.params for r in requests}
        trees = {key: WordTree.of(p.bad_words) for key, p in params.items()}
        sizes = sizes_of(requests, asked, trees.values())
        if before is not None and before.fits(slots, vocab):
            sizes = sizes.with_room_for(before.sizes)
        if before is None or not before.fits(slots, vocab) or sizes != before.sizes:
            before = cls._empty(sizes, slots, vocab)
        sets = before.rows_for(params)
        write_sets(
            before.rules,
            {row: (params[key], trees[key]) for key, row in sets.items() if key not in before.sets},
        )
        owners: list[Request | None] = [None] * slots.count
        return replace(
            before,
            asked=asked,
            sets=sets,
            owners=owners,
            static=static,
            grammars=Grammars(tokenizer, vocab) if asked.grammar else None,
        )

    def rows_for(self, keys: Collection[tuple]) -> dict[tuple, int]:
        """Rows of sets: sets that have one keep it, so that samples in flight are not affected."""
        rows = {key: self.sets[key] for key in keys if key in self.sets}
        unused = iter(sorted({*range(self.sizes.sets)} - {*rows.values()}))
        rows |= {key: next(unused) for key in keys if key not in rows}
        # another set will be written there, even if the request is then refused
        taken = {row: key for key, row in rows.items()}
        self.sets = {key: row for key, row in self.sets.items() if taken.get(row, key) == key}
        return rows

    def fits(self, slots: Slots, vocab: int) -> bool:
        """True if the tensors match these slots and vocabulary."""
        bias = self.rules.bias
        same = bias.dtype == slots.logprobs.dtype and bias.device == slots.live.device
        return same and self.ones.shape[0] == slots.count and bias.shape[1] == vocab

    @classmethod
    def _empty(cls, sizes: RuleSizes, slots: Slots, vocab: int) -> "Changes":
        device, S = slots.live.device, slots.count
        with torch.inference_mode(False):
            rules = Rules.empty_of(
                S,
                vocab,
                sets=sizes.sets,
                prompt=sizes.prompt,
                words=(sizes.edges, sizes.ends, sizes.word, sizes.hits),
                marks=sizes.marks,
                tags=(sizes.symbols, sizes.steps),
                dtype=slots.logprobs.dtype,
                device=device,
            )
            ones = torch.ones(S, dtype=torch.float64, device=device)
            return cls(rules, sizes, ones, torch.zeros(S, dtype=torch.int32, device=device))

    @property
    def key(self) -> tuple:
        """Part of a captured step's key: serial number of the tensors, and kinds of rules."""
        return self.serial, self.asked

    def begin(self, refill: Refill) -> None:
        """Prepare the functions and the grammar of a sample that `refill` puts into a slot."""
        self.owners[refill.slot] = refill.request
        if self.grammars is not None:
            self.grammars.begin(refill)

    def fill(self, refills: list[Refill]) -> None:
        """Write the rules of the samples that `refills` put into slots."""
        if not refills:
            return
        P = self.rules.prompt.shape[1]
        index = [r.slot for r in refills]
        prompts = [r.request.prompt[-P:] for r in refills]
        values = [
            (self.rules.of, [self.sets[set_of(r.request.params)] for r in refills]),
            (self.rules.prompt, [[-1] * (P - len(ids)) + ids for ids in prompts]),
            (self.rules.opened, [r.request.progress.in_budget for r in refills]),
            (self.rules.empty, [0] * len(refills)),
        ]
        write_rows([(x, index, torch.tensor(column, dtype=x.dtype)) for x, column in values])

    def plan(self, pool: Pool, slots: Slots, max_rows: int) -> Pool:
        """Returns the pool to run, of at most `max_rows` rows: grammars remove and add nodes."""
        if self.grammars is None or not pool.rows:
            return pool
        return self.grammars.plan(pool, slots, max_rows)

    def decide(
        self, ops: Ops, logits: torch.Tensor, pool: Pool, slots: Slots, top: bool, trees: bool
    ) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
        """Run `ops.decide` on the changed rows of logits; returns the same results.

        logits: [M, V], or [R, V] of the rows of `pool.texts`, of which each node changes a copy.
        """
        if pool.texts is not None:
            logits = logits[pool.texts.row.long()]
            pool = replace(pool, texts=None)
        longest = None if self.static else int(slots.generated.max())
        drafted = self.static or bool(pool.depth.any())
        x, forced = change_rows(logits, pool, slots, self.rules, self.asked, longest, drafted)
        banned = None
        if self.grammars is not None:
            banned, forced = self.grammars.rows(pool, slots, forced, self.teacher_forced)
            x.masked_fill_(banned, -torch.inf)
        if self.asked.functions:
            apply_functions(x, forced, pool, slots, self.owners, self.teacher_forced)
            if banned is not None:
                # a function must not allow a token that the grammar bans
                x.masked_fill_(banned, -torch.inf)
        if forced is not None and (self.static or bool((forced >= 0).any())):
            only(x, forced)
        short = keep_full(x, logits, self.static, self.teacher_forced)
        verdict = ops.verify(x, pool, self.without_rules(slots))
        finish_rows(verdict, logits, short, pool, slots, self.rules, ops.log_sum, self.static)
        return verdict, *ops.finish(pool, slots, verdict, top, trees)

    def without_rules(self, slots: Slots) -> Slots:
        """Slots for changed rows, which include bans of end tokens and may include the penalty."""
        off: dict[str, Any] = dict(min_new=self.zeros)
        if self.asked.penalty:
            off["repetition_penalty"] = self.ones
        return replace(slots, **off)

    def emptied(self, s: int) -> tuple[int, bool]:
        """First position of slot s from which no token could be drawn, else -1, and True if none
        was allowed there, False if a logit was NaN or +inf; waits for the device."""
        position = int(self.rules.empty[s])
        return abs(position) - 1, position > 0


@cache
def log_uncaptured(device: str) -> None:
    """Warn once that steps on a GPU run without being captured; device: its type."""
    if device == "cuda":
        LOG.warning(
            "logits_processor and grammars run on the host, so steps of such calls are not "
            "captured (static=False)"
        )
