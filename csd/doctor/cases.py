"""Sizes of a check, and checks of operations that its model does not use, on a few slots.

`run_states` runs layers with a recurrent state, `run_properties` attention with windows, chunks,
caps and sinks, which few models have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.kernels.attention.layer import LayerAttention
from csd.kernels.attention.reference import Properties
from csd.kernels.ops import Ops
from csd.kernels.states import SSM, DeltaRule, StepStates, commit_states
from csd.models.fused.config import ModelConfig, scale_of
from csd.state.kv_cache import PAGE
from csd.state.recurrent import CHUNK, ConvSize, StateMemory, StateSize, StateSizes, checkpoint
from csd.utils.device import upload

# the default model, and its vocabulary on a GPU, large enough that kernels cut it into chunks
SMALL = ModelConfig(
    family="qwen3",
    vocab=499,
    hidden=64,
    intermediate=160,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    context=1024,
    norm_eps=1e-6,
    rope_theta=10000.0,
    qk_norm=True,
)
LARGE_VOCAB = 128_256
SAMPLES, SLOTS, NODES = 3, 4, 16
SHORT = (9, 8, 30, 31, 9, 8)
SEED = 1


@dataclass(frozen=True, slots=True)
class CheckSizes:
    """Sizes of a check; the defaults reach every loop of every kernel.

    The defaults have full pages, several chunks and large pools.
    """

    prompt: int = 700  # tokens of the long prompt
    prefill_chunk: int = 256
    # tokens of its samples: more than a page and the most tokens that a step commits
    tokens: int = 82
    rows: int = 256  # rows of the largest pool

    def requests(self, vocab: int) -> list[Request]:
        """Requests of two prompts: samples share much text in one, and little in the other."""
        return [
            self._request(0, self._long(vocab), self.tokens, temperature=0.3),
            self._request(1, [t % vocab for t in SHORT], min(self.tokens, 12), temperature=0.8),
        ]

    def filtered(self, vocab: int) -> list[Request]:
        """Requests of the short prompt with every filter, and with a nucleus too large to list."""
        prompt = [t % vocab for t in SHORT]
        return [
            self._request(0, prompt, 1, temperature=2.0),
            self._request(
                1, prompt[:-1], 2, temperature=0.8, top_k=50, min_p=1e-4, repetition_penalty=1.2
            ),
            self._request(2, prompt[:-2], 2, temperature=0.5, top_p=0.9),
        ]

    def wide(self, vocab: int) -> list[Request]:
        """A request that fills every slot with a sample of the long prompt, for a few steps."""
        return [self._request(0, self._long(vocab), 2, SLOTS, temperature=0.3)]

    def _request(
        self, index: int, prompt: list[int], tokens: int, samples: int = SAMPLES, **filters: float
    ) -> Request:
        params = SamplingParams(max_new_tokens=tokens, **filters)
        return Request.of(index, prompt, params, range(samples), SEED)

    def _long(self, vocab: int) -> list[int]:
        """Random tokens followed by a repetition of the first ones, so that drafts are found."""
        generator = torch.Generator().manual_seed(0)
        again = self.prompt // 4
        fresh = torch.randint(vocab, (self.prompt - again,), generator=generator).tolist()
        return [*fresh, *fresh[:again]]


class _Inputs:
    """Inputs of operations on a device, the random ones drawn by one generator, in `dtype`."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return upload(torch.randn(shape, generator=self._generator).to(self._dtype), self._device)

    def whole(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype), self._device)

    def trees(self, parents: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Fields of a pool, whose rows are in the order of the slots.

        parents: per slot, index in the slot of each node's parent, -1 for the root.
        """
        words: list[int] = []
        start = []
        for above in parents:
            start.append(len(words))
            for i, parent in enumerate(above):
                words.append(1 << i | (words[start[-1] + parent] if i else 0))
        return dict(
            slot=self.whole([s for s, above in enumerate(parents) for _ in above]),
            depth=self.whole([word.bit_count() - 1 for word in words]),
            ancestors=self.whole(words, torch.int64),
            slot_start=self.whole(start),
            slot_nodes=self.whole([*map(len, parents)]),
        )


KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, CHANNELS, WIDTH = 2, 4, 32, 32, 48, 4
# per slot: its length, the parents of its nodes (-1 for the root), accepted nodes. The accepted
# nodes of the first slot pass a position at which states are stored
LENGTHS = (3 * CHUNK - 2, 5, 2 * CHUNK)
PARENTS = ((-1, 0, 1, 1, 2, 4), (-1, 0), (-1,))
ACCEPTED = ((0, 1, 2, 4), (0,), ())


@torch.no_grad()
def run_states(ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
    """Run every operation of layers with a state on random inputs, and commit a step.

    dtype: dtype of the model; states are wider.
    """
    # the device with its index
    device = torch.empty(0, device=device).device
    inputs = _Inputs(device, dtype)
    normal, whole = inputs.normal, inputs.whole
    pool = SimpleNamespace(**inputs.trees(PARENTS))
    pool.position = whole(LENGTHS)[pool.slot.long()] - 1 + pool.depth
    M, S = pool.slot.shape[0], len(LENGTHS)
    state = StateSize(KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM)
    sizes = StateSizes((ConvSize(CHANNELS, WIDTH),), (state, state))
    memory = StateMemory(sizes, S, M, dtype, device)
    memory.base.copy_(checkpoint(pool.position[pool.slot_start.long()]))
    for part in memory.states:
        for x in (part.state, part.key, part.update):
            x.copy_(normal(*x.shape) / KEY_DIM**0.5)
        part.decay.copy_(normal(*part.decay.shape).sigmoid() / 10 + 0.9)
    memory.convs[0].tail.copy_(normal(*memory.convs[0].tail.shape))

    step = StepStates.of(ops, memory, pool)
    step.convolve(0, normal(M, CHANNELS), normal(CHANNELS, WIDTH), normal(CHANNELS), True)
    q, k = normal(M, KEY_HEADS, KEY_DIM), normal(M, KEY_HEADS, KEY_DIM)
    v, share = normal(M, HEADS, VALUE_DIM), normal(M, HEADS).sigmoid()
    step.update(0, DeltaRule(q, k, v, -share / 10, share, normalize=True))
    step.update(1, SSM(v, share, -normal(HEADS).abs(), k, q))
    starts = pool.slot_start.tolist()
    accept = [[starts[s] + i for i in path] for s, path in enumerate(ACCEPTED)]
    depth = max(map(len, accept))
    commit_states(
        ops,
        memory,
        whole([n + len(a) for n, a in zip(LENGTHS, accept, strict=True)]),
        torch.stack([whole(row + [-1] * (depth - len(row))) for row in accept]),
        whole([len(row) for row in accept]),
    )


# one window ends inside a page, another hides nodes of a path
CASES = {
    "a window": dict(window=PAGE + 6),
    "a window shorter than a path": dict(window=3),
    "chunks": dict(chunk=PAGE - 1),
    "a cap": dict(softcap=2.0),
    "sinks": {},
    "a window, a cap and sinks": dict(window=PAGE + 6, softcap=2.0),
}
# tokens of each group's prompt and of each slot, and the group of each slot
PROMPTS, TEXT_LENGTHS, GROUPS = (3 * PAGE + 7, 5), (2 * PAGE + 1, 0, 70), (0, 0, 1)
TREE_PARENTS = ((-1, 0, 1, 1, 2, 4, 5), (-1,), (-1, 0, 0))


@torch.no_grad()
def run_properties(
    ops: Ops,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    attention: Mapping[str, Callable],
) -> None:
    """Run the operation `attention` of every case, by its name, at the config's head sizes."""
    inputs = _Inputs(device, dtype)
    normal, whole = inputs.normal, inputs.whole
    H, K, D = config.heads, config.kv_heads, config.head_dim
    trees = inputs.trees(TREE_PARENTS)
    M, pages = trees.pop("depth").shape[0], 0
    tables = []
    for lengths in (PROMPTS, TEXT_LENGTHS):
        table = torch.full((len(lengths), -(-max(lengths) // PAGE)), -1, dtype=torch.int32)
        for row, tokens in enumerate(lengths):
            count = -(-tokens // PAGE)
            table[row, :count] = torch.arange(pages, pages + count)
            pages += count
        tables.append(upload(table, device))
    # rows are ordered by group
    ends = [
        sum(len(p) for p, group in zip(TREE_PARENTS, GROUPS, strict=True) if group < g)
        for g in range(len(PROMPTS) + 1)
    ]
    where = trees | dict(
        prompt_pages=tables[0],
        prompt_len=whole(PROMPTS),
        slot_pages=tables[1],
        slot_len=whole(TEXT_LENGTHS),
        group_start=whole(ends),
    )
    q, node_k, node_v = normal(M, H, D), normal(1, M, K, D), normal(1, M, K, D)
    k, v = (normal(1, pages, PAGE, K, D) for _ in range(2))
    for name, options in CASES.items():
        attend = LayerAttention(
            attention[name],
            node_k,
            node_v,
            k,
            v,
            where,
            None,
            scale_of(config),
            plan=ops.plan_attention,
        )
        properties = Properties(K, D, D, scale_of(config), **options)  # type: ignore[arg-type]
        attend(0, q, properties=properties, sinks=normal(H) if "sinks" in name else None)
