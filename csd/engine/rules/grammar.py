"""Grammar constraints of rows: one matcher per sample, copies of which walk its draft tree.

With a thinking budget, the budget governs the thought, and the grammar the text after it:
`Thinking` does both, with the methods of the grammar's matcher.
"""

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from csd.engine.options.grammar import GRAMMARS, has_grammar, matcher_of, reader_of
from csd.engine.options.thinking import Search, ThinkingBudget, by_bytes, split
from csd.engine.requests.request import Request
from csd.engine.requests.slot_edits import Refill
from csd.graph.host_tree import Row, pool_of_rows
from csd.state.pool import MAX_DEPTH, MAX_NODES, ROOT, Pool
from csd.state.slots import Slots


class Thinking:
    """Matcher that leaves a thought unconstrained and applies the grammar to the text after it.

    A sample has at most one thought: the one that its prompt left open, or one that it begins with.
    A sample may also begin with its text, without a thought.

    A token may end the thought and go on: the grammar applies to the rest of it.

    fresh: matcher in its initial state. budget: of the sample, with once=True. vocab: number of
    logits. tokens: `csd.engine.options.thinking.by_bytes`, for the rest of a token. banned: by
    state of the search for the end tag, tokens that end it and go on as no text does; filled when
    they are needed, for all samples with the same grammar and tags.
    """

    def __init__(
        self,
        fresh: Any,
        budget: ThinkingBudget,
        vocab: int,
        tokens: dict[bytes, int],
        banned: dict[int, list[int]],
    ):
        self._fresh, self._budget, self._vocab = fresh, budget, vocab
        self._tokens, self._banned = tokens, banned
        # matcher of the text; None inside a thought, and where only a thought may begin
        self._text = None if budget.open else fresh.deep_copy()

    def deep_copy(self) -> "Thinking":
        matcher = copy(self)
        matcher._budget = self._budget.copy()
        matcher._text = None if self._text is None else self._text.deep_copy()
        return matcher

    def consume_token(self, token: int) -> bool:
        budget, text = self._budget, self._text
        if not budget.open:
            if text is None or text.validate_tokens([token]) != 1:
                if token not in budget.openings():
                    return False
                self._text = None
            else:
                text.consume_token(token)
        budget.push(token)
        if budget.open:
            self._text = None
        elif budget.rest is not None:
            self._text = self._after(*budget.rest)
            return self._text is not None
        return True

    def _after(self, token: int, symbols: int) -> Any:
        """Matcher of the text that begins after the first symbols of a token; None if none can."""
        text = self._fresh.deep_copy()
        rest = self._budget.end.symbols(token)[symbols:]
        if isinstance(rest, bytes) and rest:
            parts = split(rest, self._tokens)
            if not parts or not text.consume_tokens(parts):
                return None
        return text

    def consume_tokens(self, tokens: list[int]) -> bool:
        return all([self.consume_token(token) for token in tokens])

    def forced(self) -> int:
        """The only token that may come next, or -1 if the budget does not force one."""
        return self._budget.forced()

    def is_error(self) -> bool:
        return self._text is not None and self._text.is_error()

    def is_accepting(self) -> bool:
        """True if an end token may come next, also inside a thought whose budget is not spent."""
        if self._budget.open:
            return self.forced() < 0
        return self._text is not None and self._text.is_accepting()

    def compute_bitmask(self) -> bytes:
        size = (self._vocab + 7) // 8
        budget, forced = self._budget, self.forced()
        if budget.open and forced < 0:
            bits = np.full(size, 255, np.uint8)
            for token in self._unfit():
                bits[token // 8] &= 255 - (1 << token % 8)
            return bits.tobytes()
        bits = np.zeros(size, np.uint8)
        if self._text is not None:
            mask = np.frombuffer(self._text.compute_bitmask(), np.uint8)[:size]
            bits[: len(mask)] = mask
        for token in [forced] if forced >= 0 else budget.openings():
            if forced >= 0 or self._fits(token):
                bits[token // 8] |= 1 << token % 8
        return bits.tobytes()

    def _fits(self, token: int) -> bool:
        """True if a token that continues the begin tag can be followed by a text or a thought."""
        walk = self._budget.copy()
        walk.push(token)
        return walk.rest is None or self._after(*walk.rest) is not None

    def _unfit(self) -> list[int]:
        state = self._budget.state
        if state not in self._banned:
            ending = (
                (t, Search(self._budget.end, state).push(t)) for t in self._budget.candidates()
            )
            self._banned[state] = [t for t, symbols in ending if self._after(t, symbols) is None]
        return self._banned[state]

    def compute_ff_tokens(self) -> list[int]:
        if self._text is None:
            return self._budget.only()
        return self._text.compute_ff_tokens() if self._budget.over else []


# forced token of a row that no `Thinking` matcher governs
OTHER = -2


class Grammars:
    """Matchers of the samples in flight, by slot. vocab: number of the model's logits."""

    def __init__(self, tokenizer: Any, vocab: int):
        self._tokenizer, self._vocab = tokenizer, vocab
        self._matchers: dict[int, Any] = {}
        self._requests: dict[int, Request] = {}
        self._read: dict[int, int] = {}  # number of the sample's tokens that each has read
        # by slot: end tokens, with True if a sample ends there
        self._ends: dict[int, dict[int, bool]] = {}
        self._fresh: dict[tuple, Any] = {}  # matchers in their initial state, by grammar of a call
        self._banned: dict[tuple, dict[int, list[int]]] = {}  # of `Thinking`, by grammar and tag
        # the last planned pool, the tokens each row allows, and the token its budget forces
        self._planned: tuple[Pool, np.ndarray, list[int]] | None = None

    def begin(self, refill: Refill) -> None:
        """Set the matcher and end tokens of the slot that `refill` puts a sample in."""
        s, request = refill.slot, refill.request
        params, fresh = request.params, request.matcher
        if fresh is None:
            key = tuple(getattr(params, name) for name in GRAMMARS)
            if key not in self._fresh:
                self._fresh[key] = matcher_of(params, self._tokenizer, self._vocab)
            fresh = self._fresh[key]
        self._matchers[s] = None if fresh is None else self._matcher(fresh, request)
        self._read[s], self._ends[s] = 0, self._ends_of(params)
        self._requests[s] = request

    def _ends_of(self, params: Any) -> dict[int, bool]:
        """End tokens of a sample map to True; the tokenizer's, if it is not one of them, to False.

        A sample without end tokens has none here: its matcher allows the tokenizer's end token
        where the text is complete, because otherwise no token might be left.
        """
        ends = dict.fromkeys(params.end_ids, True)
        if ends and has_grammar(params):
            ends.setdefault(reader_of(self._tokenizer, self._vocab).eos_token, False)
        return ends

    def _matcher(self, fresh: Any, request: Request) -> Any:
        limit, tags = request.params.max_thinking_tokens, request.params.thinking_tags
        if limit is None or tags is None:
            return fresh.deep_copy()
        budget = ThinkingBudget(tags, limit, request.prompt, request.progress.in_budget, once=True)
        tokens = {} if budget.end.text is None else by_bytes(self._tokenizer, self._vocab)
        key = (*(getattr(request.params, name) for name in GRAMMARS), tags[1])
        banned = self._banned.setdefault(key, {})
        return Thinking(fresh, budget, self._vocab, tokens, banned)

    def plan(self, pool: Pool, slots: Slots, max_rows: int) -> Pool:
        """Remove nodes that no sample can reach from the pool, and add nodes that grammars force.

        max_rows: largest number of rows. A forced chain is added as a child of its node, whether or
        not that has other children. It costs only its rows: it is accepted unless the text
        continues with other tokens. So the chains behind roots, which are reached for certain, get
        their rows before drafted nodes; the others get those that are left.
        """
        # two copies to the host
        fields = [pool.token, pool.parent, pool.depth, pool.cost, pool.source, pool.slot]
        *fields, slot = torch.stack(fields).tolist()
        rows = [Row(*row) for row in zip(*fields, strict=True)]
        start, nodes, generated = _slots_on_host(pool, slots)
        drafts = {
            s: [
                row._replace(parent=row.parent - start[s]) if row.parent >= 0 else row
                for row in rows[start[s] : start[s] + nodes[s]]
            ]
            for s in dict.fromkeys(s for s in slot if s >= 0)
        }
        chains = {s: self._missing(own, s, slots, generated) for s, own in drafts.items()}
        drafts = _cheapest(drafts, max_rows - sum(chains.values()), chains)
        room = max_rows - sum(map(len, drafts.values()))
        trees: dict[int, list[Row]] = {}
        bits: list[np.ndarray] = []
        forced: list[int] = []
        for s, own in drafts.items():
            # rows of the chains behind other slots' roots are not to be used
            chains[s] = min(chains[s], room)
            others = sum(chains.values()) - chains[s]
            mine = min(max(room - others, chains[s]), MAX_NODES - len(own))
            tree = _Tree(own, self._ends[s], self._vocab, mine)
            walked = self._walk(tree, s, slots, generated)
            chains[s] = 0
            if walked:
                room -= max(len(tree.rows) - len(own), 0)
            trees[s] = tree.rows if walked else own
            bits += tree.bits if walked else [tree.every] * len(own)
            forced += tree.forced if walked else [OTHER] * len(own)
        # indices without the root, which comes first
        drafted = {
            s: [row._replace(parent=row.parent - 1) for row in tree[1:]]
            for s, tree in trees.items()
        }
        planned = pool_of_rows(drafted, slots, len(bits))
        self._planned = planned, np.stack(bits), forced
        return planned

    def _missing(self, own: list[Row], s: int, slots: Slots, generated: list[int]) -> int:
        """Number of tokens that are forced behind the root of slot s, but not drafted there."""
        matcher = self._guarded(s, lambda: self._at(s, slots, generated))
        chain = [] if matcher is None else self._guarded(s, matcher.compute_ff_tokens) or []
        node, chain = 0, chain[:MAX_DEPTH]
        for depth, token in enumerate(chain):
            below = [n for n, row in enumerate(own) if row.parent == node and row.token == token]
            if not below:
                return len(chain) - depth
            node = below[0]
        return 0

    def rows(
        self, pool: Pool, slots: Slots, forced: torch.Tensor | None, teacher_forced: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [M, V] bool that grammars ban after each row's prefix, and forced tokens [M].

        Rows after a banned token or an end token ban nothing: no sample reaches them.
        forced: tokens that thinking budgets force without a grammar, or -1. teacher_forced: True if
        the tokens are input rather than drawn; after a token that the grammar does not allow, it
        bans nothing.
        """
        if self._planned is not None and self._planned[0] is pool:
            _, bits, own = self._planned
        else:
            bits, own = self._of_pool(pool, slots, teacher_forced)
        allowed = np.unpackbits(bits, axis=1, bitorder="little", count=self._vocab)
        device = pool.token.device
        if forced is not None:
            listed = torch.tensor(own, device=device)
            forced = torch.where(listed == OTHER, forced, listed)
        return torch.from_numpy(allowed == 0).to(device), forced

    def _of_pool(
        self, pool: Pool, slots: Slots, teacher_forced: bool
    ) -> tuple[np.ndarray, list[int]]:
        """Allowed tokens as bits [M, V / 8] uint8, and forced tokens [M], for an unplanned pool."""
        token, parent = torch.stack([pool.token, pool.parent]).tolist()
        start, nodes, generated = _slots_on_host(pool, slots)
        bits = np.full((pool.rows, (self._vocab + 7) // 8), 255, np.uint8)
        forced = [OTHER] * pool.rows
        for s in range(slots.count):
            if not nodes[s] or self._matchers.get(s) is None:
                continue
            rows = range(start[s], start[s] + nodes[s])
            own = [Row(token[m], max(parent[m] - start[s], -1), 0, 0, ROOT) for m in rows]
            tree = _Tree(own, self._ends[s], self._vocab, 0)
            if not self._walk(tree, s, slots, generated, teacher_forced):
                continue
            for index, allowed, only in zip(tree.places, tree.bits, tree.forced, strict=True):
                bits[start[s] + index], forced[start[s] + index] = allowed, only
        return bits, forced

    def _walk(
        self,
        tree: "_Tree",
        s: int,
        slots: Slots,
        generated: list[int],
        teacher_forced: bool = False,
    ) -> bool:
        """Walk the tree of slot s with its matcher; False if it has none."""

        def walk() -> bool:
            matcher = self._at(s, slots, generated, teacher_forced)
            if matcher is not None:
                tree.walk(0, matcher)
            return matcher is not None

        return bool(self._guarded(s, walk))

    def _guarded(self, s: int, use: Callable[[], Any]) -> Any:
        """Returns use(), which reads the matcher of slot s; None if it raises.

        A matcher that raises, as where its memory is used up, leaves its sample without a grammar
        until the request ends with the error.
        """
        try:
            return use()
        except (KeyboardInterrupt, SystemExit):
            raise
        # a panic of a matcher's library is a BaseException
        except BaseException as error:
            self._matchers[s], self._requests[s].progress.fault = None, error
            return None

    def _at(self, s: int, slots: Slots, generated: list[int], teacher_forced: bool = False) -> Any:
        """The matcher of slot s, after it has read all tokens that the sample has committed."""
        matcher = self._matchers.get(s)
        if matcher is not None and self._read[s] < generated[s]:
            # a sample's own tokens are always allowed, and after its end it has no rows
            tokens = slots.tokens[s, self._read[s] : generated[s]].tolist()
            self._read[s] = generated[s]
            if not teacher_forced:
                matcher.consume_tokens(tokens)
            elif not all(self._reads(matcher, s, token) for token in tokens):
                self._matchers[s] = matcher = None
        return matcher

    def _reads(self, matcher: Any, s: int, token: int) -> bool:
        """True if the matcher of slot s allowed a token that does not end the text, and read it."""
        if token in self._ends[s]:
            return False
        bits = _allowed(matcher, self._ends[s], self._vocab)
        return _has(bits, token) and matcher.consume_token(token)


@dataclass(slots=True)
class _Tree:
    """Rows of one slot; `rows` keeps those that its matcher reaches, parents first."""

    own: list[Row]
    ends: dict[int, bool]  # see `Grammars._ends_of`
    vocab: int
    room: int  # rows that may be added

    rows: list[Row] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # index of each in `own`, -1 if it was added
    bits: list[np.ndarray] = field(default_factory=list)  # tokens that each allows
    # token that the thinking budget forces, -1 for none, OTHER without a budget
    forced: list[int] = field(default_factory=list)

    @property
    def every(self) -> np.ndarray:
        """Bits of a row that allows every token."""
        return np.full((self.vocab + 7) // 8, 255, np.uint8)

    def walk(self, index: int, matcher: Any, above: int = -1) -> None:
        """Keep own row `index`, up to which the matcher has read, and the reachable rows below it.

        above: index in `rows` of the row's parent.
        """
        row = self.own[index]
        parent = self._keep(row._replace(parent=above), index, matcher)
        forced = matcher.compute_ff_tokens() if self.room > 0 else []
        children = [
            (child, below.token)
            for child, below in enumerate(self.own)
            if below.parent == index and self._allows(parent, below.token)
        ]
        # the forced chain first, also where a drafted node begins it: it is the likeliest
        if forced and forced[0] not in {token for _, token in children}:
            self._extend(parent, forced, matcher.deep_copy())
        for child, token in sorted(children, key=lambda x: x[1] not in forced[:1]):
            branch = matcher.deep_copy()
            if branch.consume_token(token):
                self.walk(child, branch, parent)

    def _extend(self, parent: int, forced: list[int], matcher: Any) -> None:
        """Add a chain of forced tokens below row `parent`, as far as there is room."""
        for token in forced:
            row = self.rows[parent]
            fits = self.room > 0 and row.depth < MAX_DEPTH and self._allows(parent, token)
            if not fits or not matcher.consume_token(token):
                break
            self.room -= 1
            parent = self._keep(Row(token, parent, row.depth + 1, row.cost, ROOT), -1, matcher)

    def _keep(self, row: Row, index: int, matcher: Any) -> int:
        self.rows.append(row)
        self.places.append(index)
        self.bits.append(_allowed(matcher, self.ends, self.vocab))
        self.forced.append(matcher.forced() if isinstance(matcher, Thinking) else OTHER)
        return len(self.rows) - 1

    def _allows(self, index: int, token: int) -> bool:
        return _has(self.bits[index], token) and token not in self.ends


def _has(bits: np.ndarray, token: int) -> bool:
    """True if the token's bit is set in bits [V / 8] uint8."""
    return bool(bits[token // 8] >> (token % 8) & 1)


def _slots_on_host(pool: Pool, slots: Slots) -> list[list[int]]:
    """First row, number of rows and number of generated tokens of each slot, in one copy."""
    return torch.stack([pool.slot_start, pool.slot_nodes, slots.generated]).tolist()


def _cheapest(
    trees: dict[int, list[Row]], max_rows: int, chains: dict[int, int]
) -> dict[int, list[Row]]:
    """The roots, and the cheapest nodes of all slots that fit into `max_rows` rows, parents first.

    A slot keeps at most the nodes that leave room for its chain of `chains` rows.
    """
    cost = sorted((row.cost, s, n) for s, tree in trees.items() for n, row in enumerate(tree) if n)[
        : max(max_rows - len(trees), 0)
    ]
    # a node costs at least as much as its parent, and stands behind it
    count = Counter(s for _, s, _ in cost)
    return {s: tree[: min(1 + count[s], MAX_NODES - chains[s])] for s, tree in trees.items()}


def _allowed(matcher: Any, ends: dict[int, bool], vocab: int) -> np.ndarray:
    """Bits [V / 8] uint8 of allowed next tokens; end tokens only where the text is complete."""
    bits = np.zeros((vocab + 7) // 8, np.uint8)
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: len(bits)]
    if matcher.is_error():
        # beyond llguidance's limits, where it would end the text: no token is left
        return bits
    bits[: len(mask)] = mask
    accepts = matcher.is_accepting()
    for end, ends_there in ends.items():
        # a tokenizer may have more tokens than the model
        if end >= vocab:
            continue
        bit = 1 << end % 8
        allows = accepts and ends_there
        bits[end // 8] = bits[end // 8] | bit if allows else bits[end // 8] & (255 - bit)
    return bits
