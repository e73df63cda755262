"""Tree attention on a CPU whose result for a row has the same bits in every step.

The formula is in `csd/kernels/tree_attention/`. A row's result is a function of its own query,
keys and values, to the bit: it does not depend on the other rows of the step, nor on which of its
keys are nodes and which are committed. Its keys are taken in three parts (`exact_work`): those of
the prompt, those of its body in whole pages, those of its tail one by one. Of each comes a sum of
exp(score - m), with m the largest score of all three, and a sum of those weights times the values;
they are added up in order of position. Products are over fixed numbers of keys, so masked keys add
exact zeros, and have a least number of rows (`batched`).
"""


import torch
import torch.nn.functional as F

from csd.kernels.tree_attention.exact_work import HostBody, HostWork, exact_work
from csd.kernels.tree_attention.reference import without_autocast
from csd.state.kv_cache import PAGE

# a product's row has the same bits among any number of rows from here on, of two or more matrices
LEAST_ROWS = 4
# smaller matrices PyTorch multiplies by itself
LEAST_PRODUCTS = 400


@without_autocast
def tree_attention_exact(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, D]
    prompt_pages: torch.Tensor,  # [G, PP] int32
    prompt_len: torch.Tensor,  # [G] int32
    slot_pages: torch.Tensor,  # [S, SP] int32
    slot_len: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32
    ancestors: torch.Tensor,  # [M] int64
    slot_start: torch.Tensor,  # [S] int32
    slot_nodes: torch.Tensor,  # [S] int32
    group_start: torch.Tensor,  # [G + 1] int32
    scale: float,
    work: HostWork | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain PyTorch, in the inputs' dtype but at least float32. work: `exact_work` of the step.

    Below, R rows of slots; everything has the key-value head in front, so that the query heads of
    a key-value head are rows of one matrix.
    """
    if work is None:
        work = exact_work(
            prompt_pages,
            prompt_len,
            slot_pages,
            slot_len,
            slot,
            ancestors,
            slot_start,
            slot_nodes,
            group_start,
        )
    H, D = q.shape[1:]
    K, R = node_k.shape[1], work.rows
    each = H // K
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q) if out is None else out
    out[R:].zero_()
    if R == 0:
        return out
    packed = torch.empty(K, R, each, D, dtype=dtype, device=q.device)
    packed.copy_(q[:R].view(R, K, each, D).transpose(0, 1)).mul_(scale)
    # a key-value head's key of a token is a row
    k_rows, v_rows = k_pages.view(-1, D), v_pages.view(-1, D)

    # [K, tokens, D]: one matrix a key-value head, without a copy
    k_heads, v_heads = (x.flatten(0, 1).transpose(0, 1) for x in (k_pages, v_pages))
    prompt = [
        batched(
            packed[:, g.first : g.last].reshape(K, -1, D), k_heads[:, g.tokens].to(dtype).mT
        ).view(K, g.last - g.first, each, g.count)
        for g in work.groups
        if g.count
    ]
    body = [_body_scores(packed, k_rows, b, work.kept, i) for i, b in enumerate(work.bodies)]
    # [K, R, each, T]
    keys = _tail_of(k_rows, node_k, work, dtype, "k")
    tail = paired(packed.view(K * R, each, D), keys.mT).view(K, R, each, -1)
    if work.tail.hidden is not None:
        tail.add_(work.tail.hidden)

    most = tail.amax(-1)
    for g, score in zip((g for g in work.groups if g.count), prompt, strict=True):
        mine = most[:, g.first : g.last]
        torch.maximum(mine, score.amax(-1), out=mine)
    if body:
        most = torch.maximum(most, _by_row([s.amax(-1) for s in body], work, float("-inf")))

    total, acc = torch.empty_like(most), torch.empty_like(packed)
    for g in work.groups:
        if not g.count:
            total[:, g.first : g.last] = 0
            acc[:, g.first : g.last] = 0
    for g, score in zip((g for g in work.groups if g.count), prompt, strict=True):
        weight = score.sub_(most[:, g.first : g.last, :, None]).exp_()
        total[:, g.first : g.last] = weight.sum(-1)
        value = batched(weight.view(K, -1, g.count), v_heads[:, g.tokens].to(dtype))
        acc[:, g.first : g.last] = value.view(K, -1, each, D)
    if body:
        sums = [
            _body_sums(score, most, v_rows, b, work.kept, i)
            for i, (score, b) in enumerate(zip(body, work.bodies, strict=True))
        ]
        total += _by_row([s for s, _ in sums], work)
        acc += _by_row([v for _, v in sums], work)
    weight = tail.sub_(most[..., None]).exp_()
    total += weight.sum(-1)
    values = _tail_of(v_rows, node_v, work, dtype, "v")
    acc += paired(weight.view(K * R, each, -1), values).view(K, R, each, D)
    acc /= total[..., None]
    out[:R].view(R, K, each, D).copy_(acc.transpose(0, 1))
    return out


def batched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [B, n, k] times b [B, k, m]; a row has the same bits for every n."""
    rows, least = a.shape[1], max(LEAST_ROWS, -(-LEAST_PRODUCTS // max(b.shape[1] * b.shape[2], 1)))
    if rows >= least:
        return paired(a, b)
    return paired(F.pad(a, (0, 0, 0, least - rows)), b)[:, :rows]


def paired(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [B, n, k] times b [B, k, m]; out is added to. One matrix alone is multiplied twice: its
    rows may be split among threads, and those of several are not."""
    if a.shape[0] > 1:
        return torch.bmm(a, b) if out is None else out.baddbmm_(a, b)
    twice = torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return twice if out is None else out.add_(twice)


def _tail_of(
    pages: torch.Tensor, nodes: torch.Tensor, work: HostWork, dtype: torch.dtype, name: str
) -> torch.Tensor:
    """Keys or values of all tails, [K * R, T, D]."""
    K, D = nodes.shape[1:]
    tail, kept = work.tail, work.kept
    if ("tail", K) not in kept:
        head = torch.arange(K)[:, None]
        token = torch.from_numpy(tail.token.ravel())
        row, at = torch.from_numpy(tail.node_row).long(), torch.from_numpy(tail.node_at)
        kept["tail", K] = tuple(
            x.ravel() for x in (token * K + head, row * K + head, at + head * token.shape[0])
        )
    token, row, at = kept["tail", K]
    got = _scratch(kept, ("tail", name), (token.shape[0], D), pages)
    torch.index_select(pages, 0, token, out=got)
    got.index_copy_(0, at, nodes.reshape(-1, D).index_select(0, row))
    return _wide(kept, ("tail", name), got, dtype).view(-1, tail.token.shape[1], D)


def _body_of(
    pages: torch.Tensor, body: HostBody, K: int, dtype: torch.dtype, kept: dict, name: tuple
) -> torch.Tensor:
    """Keys or values of a body's slots, [K * B, W, D]."""
    key = "body", name[1], K
    if key not in kept:
        token = torch.from_numpy(body.token.ravel())
        kept[key] = (token * K + torch.arange(K)[:, None]).ravel()
    got = _scratch(kept, name, (kept[key].shape[0], pages.shape[1]), pages)
    torch.index_select(pages, 0, kept[key], out=got)
    return _wide(kept, name, got, dtype).view(-1, body.width, pages.shape[1])


def _body_scores(
    packed: torch.Tensor, k_rows: torch.Tensor, body: HostBody, kept: dict, i: int
) -> torch.Tensor:
    """[K, B * P, each, W]"""
    K, R, each, D = packed.shape
    B = body.token.shape[0]
    q = packed.view(K, R, each * D).index_select(1, body.row).view(K * B, -1, D)
    keys = _body_of(k_rows, body, K, packed.dtype, kept, ("k", i))
    score = batched(q, keys.mT)
    score.view(K, B, -1, each, body.width).add_(body.hidden)
    return score.reshape(K, -1, each, body.width)


def _body_sums(
    score: torch.Tensor,
    most: torch.Tensor,
    v_rows: torch.Tensor,
    body: HostBody,
    kept: dict,
    i: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [K, B * P, each] and weighted values [K, B * P, each, D], page by page."""
    K, places, each, width = score.shape
    D, B = v_rows.shape[1], body.token.shape[0]
    weight = score.sub_(most.index_select(1, body.row)[..., None]).exp_()
    # a running sum over pages: those of no key at the end change nothing
    total = weight.view(K, places, each, -1, PAGE).sum(-1).cumsum(-1)[..., -1]
    values = _body_of(v_rows, body, K, score.dtype, kept, ("v", i))
    weight = weight.view(K * B, -1, width)
    rows = weight.shape[1]
    if rows < LEAST_ROWS:
        weight = F.pad(weight, (0, 0, 0, LEAST_ROWS - rows))
    acc = paired(weight[..., :PAGE], values[:, :PAGE])
    for at in range(PAGE, width, PAGE):
        acc = paired(weight[..., at : at + PAGE], values[:, at : at + PAGE], out=acc)
    return total, acc[:, :rows].reshape(K, places, each, D)


def _by_row(parts: list[torch.Tensor], work: HostWork, nothing: float = 0.0) -> torch.Tensor:
    """What the bodies' places have, [K, places, ..] each, for every row: [K, R, ..]."""
    assert work.place is not None
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    K, places, *rest = whole.shape
    whole = whole.reshape(K, places, -1)
    if work.kept.setdefault("all", int(work.place.max()) < places):
        return whole.index_select(1, work.place).view(K, -1, *rest)
    whole = F.pad(whole, (0, 0, 0, 1), value=nothing)
    return whole.index_select(1, work.place).view(K, -1, *rest)


def _scratch(kept: dict, name: tuple, shape: tuple, like: torch.Tensor) -> torch.Tensor:
    """Memory that the layers share: fresh memory costs more than the arithmetic."""
    key = *name, like.dtype
    if key not in kept or kept[key].shape != shape:
        kept[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
    return kept[key]


def _wide(kept: dict, name: tuple, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype == dtype:
        return x
    key = *name, dtype
    if key not in kept or kept[key].shape != x.shape:
        kept[key] = torch.empty_like(x, dtype=dtype)
    return kept[key].copy_(x)


def check_products(head_dim: int) -> None:
    """Raises ValueError where this machine's products give a row other bits among other rows."""
    generator = torch.Generator().manual_seed(0)
    for inner, outer in ((head_dim, PAGE), (PAGE, head_dim), (head_dim, 200), (200, head_dim)):
        a = torch.randn(2, 192, inner, generator=generator)
        b = torch.randn(2, inner, outer, generator=generator)
        whole = batched(a, b)
        for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64, 65, 100, 129):
            if not torch.equal(batched(a[:, :rows], b), whole[:, :rows]):
                raise ValueError(
                    f"exact must be False here: products over {inner} numbers give a row other "
                    f"bits among {rows} rows than among 192 on this machine"
                )
