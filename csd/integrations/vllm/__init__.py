"""Drafts for vLLM: `speculative_config={"model": "csd.integrations.vllm.Proposer", ...}`."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from csd.graph.consensus import PIECE, WITH_HISTORY
from csd.graph.history import capacity_for
from csd.integrations.vllm.rows import (
    ENTERED,
    ConsensusChain,
    InFlight,
    PromptGroup,
    RequestSample,
    committed,
    empty_slots,
    windows,
)
from csd.kernels.ops import reference
from csd.state.context_table import GraphConfig
from csd.state.pool import MAX_DEPTH
from csd.state.slots import MAX_STOP_IDS
from csd.traces.history import History

# pieces of prompts and past samples that are inserted into the graph per call
PIECES = 8


class Proposer:
    """Proposer for vLLM's `custom_class`: drafts chains from a consensus graph of each prompt.

    Rows with the same prompt tokens are a group. After its samples have ended, a group is stored in
    `history` for later samples of its prompt.

    Options are class attributes; `speculative_config` names a subclass to set others.

    step_tokens: most tokens that a step verifies, each row's last token and its drafts, but at
        least one draft per row. They go to the likeliest paths of all rows.
    min_prob: paths less likely than this are not drafted.
    history_samples, history_tokens: limits of the `csd.History`; 0 samples turn it off.
    patience: calls without a sample after which the sample counts as ended.

    Raises ValueError when `num_speculative_tokens` is not from 1 to 16.
    """

    step_tokens: ClassVar[int] = 256
    min_prob: ClassVar[float] = 0.05
    history_samples: ClassVar[int] = 8
    history_tokens: ClassVar[int] = 4_000_000
    patience: ClassVar[int] = 1000

    def __init__(self, vllm_config: Any):
        k = vllm_config.speculative_config.num_speculative_tokens
        if not 1 <= k <= MAX_DEPTH:
            raise ValueError(f"num_speculative_tokens must be from 1 to {MAX_DEPTH}, got {k}")
        model, rows = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs
        self.length: int = model.max_model_len
        # min_prob cuts chains by their path's probability, so all samples have the same decay per
        # level (settle=0)
        made_for = WITH_HISTORY | {"settle": 0}
        config = GraphConfig(max_depth=k, min_prob=self.min_prob, **made_for)
        config = replace(config, capacity=capacity_for(rows * self.length, config))
        self.graph = ConsensusChain(reference(), "cpu", config)
        self.history: History | None = None
        if self.history_samples:
            self.history = History(self.history_samples, self.history_tokens)
        # a sample may exceed the model's length by the drafts of its last step
        self.rows = InFlight(
            rows,
            self.length + ENTERED,
            self.patience,
            max(self.history_samples, 1),
            self._begin,
            self._release,
        )
        self._slots = empty_slots(rows, self.rows.group_slots, config.context)
        self._ends = end_tokens(model)
        self._slots.stop_ids[:, : len(self._ends)] = torch.tensor(self._ends, dtype=torch.int32)
        self._entering: deque[tuple[PromptGroup, Iterator]] = deque()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: vLLM calls it, but a graph has no weights."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,  # [rows], a row's tokens, the sampled ones included
        token_ids_cpu: np.ndarray,  # [rows, tokens]
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns drafted tokens per row; none for a row in prefill, which has sampled none."""
        samples = self.rows.find(
            {
                i: (token_ids_cpu[i, : num_tokens_no_spec[i]], len(new))
                for i, new in enumerate(sampled_token_ids)
                if len(new)
            }
        )
        self._enter()
        self._observe(samples)
        drafts = self._draft(samples)
        return [drafts.get(i, []) for i in range(len(sampled_token_ids))]

    def _begin(self, group: PromptGroup) -> None:
        self._slots.group_key[group.index] = group.key
        self._slots.prompt_len[group.index] = group.prompt.size - 1
        self._entering.append((group, self._pieces(group)))

    def _release(self, group: PromptGroup) -> None:
        self._slots.group_key[group.index] = -1
        if self.history is not None:
            self.history.add(group.prompt.tolist(), [ids for _, ids in sorted(group.finished)])

    def _pieces(self, group: PromptGroup) -> Iterator:
        """Insert a group's prompt, then its past samples, into the graph: one piece per `next`."""
        prompt, position = group.prompt.tolist(), 0
        for read in [*range(PIECE, len(prompt), PIECE), len(prompt)]:
            position = self.graph.observe_prompt(group.key, prompt, position, read, self._slots)
            yield
        if self.history is not None:
            past = self.history.of(prompt)
            fits = self.graph.max_history(past, len(self.rows.groups))
            yield from self.graph.enter_history(group.key, prompt, past[:fits], self._slots)

    def _enter(self) -> None:
        """Insert at most PIECES pieces of waiting groups, round robin."""
        left = PIECES
        while self._entering and left:
            group, pieces = self._entering.popleft()
            # a group that has been released is dropped
            if int(self._slots.group_key[group.index]) == group.key and next(pieces, self) != self:
                self._entering.append((group, pieces))
                left -= 1

    def _observe(self, samples: dict[int, RequestSample]) -> None:
        longest = max((len(s.new) for s in samples.values()), default=0)
        for begin in range(0, longest, ENTERED):
            part = {i: s for i, s in samples.items() if len(s.new) > begin}
            self._set_slots(part)
            pool, verdict = committed(part, begin, self._slots)
            self.graph.insert(pool, self._slots, verdict)

    def _draft(self, samples: dict[int, RequestSample]) -> dict[int, list[int]]:
        """Draft for the rows that have not just sampled an end token."""
        part = {i: s for i, s in samples.items() if s.new[-1] not in self._ends}
        if not part:
            return {}
        self._set_slots(part)
        count = len(part)
        pool = self.graph.propose(self._slots, count + max(self.step_tokens - count, count))
        token = pool.token.tolist()
        start, nodes = pool.slot_start.tolist(), pool.slot_nodes.tolist()
        return {i: token[start[i] + 1 : start[i] + nodes[i]] for i in part}

    def _set_slots(self, part: dict[int, RequestSample]) -> None:
        """Write rows to the slots: row i is slot i, and only the rows of `part` are live."""
        slots, samples = self._slots, part.values()
        slots.live.fill_(False)
        row = torch.tensor(list(part))
        slots.live[row] = True
        for name, values in (
            ("group", [s.group.index for s in samples]),
            ("sample", [s.number for s in samples]),
            ("step", [s.calls for s in samples]),
            ("max_new", [self.length - s.length for s in samples]),
        ):
            getattr(slots, name)[row] = torch.tensor(values, dtype=torch.int32)
        N = slots.context.shape[1]
        last = np.stack([windows(s, s.length, 1, N)[0] for s in samples])
        slots.context[row] = torch.from_numpy(last)


def end_tokens(model: Any) -> list[int]:
    """End tokens of a checkpoint, from vLLM's `ModelConfig`; nothing is drafted after them."""
    id_lists = (
        model.try_get_generation_config().get("eos_token_id"),
        getattr(model.hf_config, "eos_token_id", None),
    )
    ends: set[int] = set()
    for ids in id_lists:
        if ids is not None:
            ends |= set(ids) if isinstance(ids, Iterable) else {ids}
    return sorted(ends)[:MAX_STOP_IDS]
