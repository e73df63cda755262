"""The same attention composed of PyTorch's own operations, as fast as they allow.

Each function lays out a job's keys and values for its operations and builds masks, which is not
measured. It returns the call to measure, without arguments, and a function that brings the call's
result into csd's order, [M, H, D].
"""

from functools import cache, lru_cache, partial

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from bench.micro.jobs.attention_job import PAGE, Job

aten = torch.ops.aten
# below this number of rows, flex_attention uses a separate kernel
FEW = 128


def prompt_of(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values of the prompt, [P, K, D] each."""
    pages = -(-job.shape.prompt // PAGE)
    return tuple(x[:pages].flatten(0, 1)[: job.shape.prompt] for x in (job.k_pages, job.v_pages))


def own_of(job: Job, multiple: int = 16) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns each sample's own keys and values, [N, W, K, D], and the longest committed length.

    Committed ones start at 0, those of nodes at the longest length. W is a multiple of `multiple`.
    """
    s, longest = job.shape, max(job.lengths)
    W = -(-(longest + s.nodes) // multiple) * multiple
    own = []
    for pages, node in ((job.k_pages, job.node_k), (job.v_pages, job.node_v)):
        x = pages.new_zeros(s.samples, W, s.K, s.D)
        for i, n in enumerate(job.lengths):
            first = int(job.slot_pages[i, 0])
            x[i, :n] = pages[first : first - (-n // PAGE)].flatten(0, 1)[:n]
        x[:, longest : longest + s.nodes] = node.view(s.samples, s.nodes, s.K, s.D)
        own.append(x)
    return *own, longest


def visible(job: Job, W: int, longest: int) -> torch.Tensor:
    """Bool [N, T, W]: the W own columns of a sample that its rows attend to."""
    s = job.shape
    column = torch.arange(W, device=job.q.device)
    node = column - longest
    words = job.ancestors.view(s.samples, s.nodes, 1)
    above = (words >> node.clamp(0, 63)) & 1 == 1
    return (column < job.slot_len[:, None, None]) | (above & (node >= 0) & (node < s.nodes))


def packed_queries(job: Job) -> torch.Tensor:
    """Queries [1, K, M * H / K, D], with the heads of a key-value head as rows, as csd's kernel."""
    s = job.shape
    return job.q.view(s.rows, s.K, -1, s.D).transpose(0, 1).reshape(1, s.K, -1, s.D)


def merge(a, lse_a, b, lse_b) -> torch.Tensor:
    """Merge attention over two sets of keys: results [.., R, D], natural-log lse [.., R]."""
    weight = torch.sigmoid(lse_b - lse_a)[..., None]
    return torch.lerp(a.float(), b.float(), weight).to(a.dtype)


@cache
def compiled(function):
    return torch.compile(function, dynamic=False)


def _fast(function, job: Job):
    """Returns the function compiled on a GPU, unchanged on a CPU."""
    return compiled(function) if job.q.is_cuda else function


def _flash(q, k, v, scale):
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)


def _masked(q, k, v, bias, scale):
    if q.is_cuda:
        out, lse = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, compute_log_sumexp=True, scale=scale
        )[:2]
        return out, lse[..., : q.shape[2]]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)


def _bias(job: Job, W: int, longest: int) -> torch.Tensor:
    """Additive mask [N, K, T * H / K, W], -inf where a row does not attend."""
    s = job.shape
    seen = visible(job, W, longest).repeat_interleave(s.H // s.K, 1)[:, None]
    bias = torch.zeros(seen.shape, dtype=job.q.dtype, device=job.q.device)
    return bias.masked_fill_(~seen, float("-inf")).expand(-1, s.K, -1, -1)


def _rows(job: Job, out: torch.Tensor) -> torch.Tensor:
    """Reorder [N, K, T * H / K, D] to csd's [M, H, D]."""
    s = job.shape
    return out.unflatten(2, (s.nodes, -1)).permute(0, 2, 1, 3, 4).reshape(s.rows, s.H, s.D)


def sdpa(job: Job, fused: bool = True):
    """Two SDPA calls and a merge (Juravsky et al., "Hydragen", 2024).

    One call attends to the prompt for all rows (flash), the other to each sample's own keys with a
    mask. fused: compile the merge on a GPU, which takes seconds a shape, into one launch.
    """
    s, scale = job.shape, job.shape.D**-0.5
    k, v = (x.transpose(0, 1)[None].contiguous() for x in prompt_of(job))
    *own, longest = own_of(job)
    own_k, own_v = (x.transpose(1, 2).contiguous() for x in own)
    q = packed_queries(job)
    own_q = q[0].unflatten(1, (s.samples, -1)).transpose(0, 1)
    bias, combine = _bias(job, own_k.shape[2], longest), _fast(merge, job) if fused else merge

    def call():
        out, lse = _flash(q, k, v, scale)
        by_sample = (x[0].unflatten(1, (s.samples, -1)).transpose(0, 1) for x in (out, lse))
        return combine(*_masked(own_q, own_k, own_v, bias, scale), *by_sample)

    return call, lambda out: _rows(job, out)


def sdpa_copied(job: Job):
    """One SDPA call with a dense mask, over a copy of the prompt for every sample."""
    s, scale = job.shape, job.shape.D**-0.5
    *own, longest = own_of(job)
    k, v = (
        torch.cat([p.expand(s.samples, *p.shape), x], 1).transpose(1, 2).contiguous()
        for p, x in zip(prompt_of(job), own, strict=True)
    )
    # pad again, since prompt and own columns together need not be a multiple of 16
    k, v = (F.pad(x, (0, 0, 0, -x.shape[2] % 16)) for x in (k, v))
    own_bias = _bias(job, own[0].shape[1], longest)
    bias = own_bias.new_full((s.samples, 1, own_bias.shape[2], k.shape[2]), float("-inf"))
    bias[..., : s.prompt] = 0
    bias[..., s.prompt : s.prompt + own_bias.shape[3]] = own_bias[:, :1]
    bias = bias.expand(-1, s.K, -1, -1)
    q = packed_queries(job)[0].unflatten(1, (s.samples, -1)).transpose(0, 1).contiguous()
    return lambda: _masked(q, k, v, bias, scale)[0], lambda out: _rows(job, out)


# cached, since copies of a job share their tables: one mask, and one compilation of flex_attention
@lru_cache(maxsize=1)
def _line_blocks(lengths, words, slots, each, prompt, start, W, longest, nodes, columns):
    def mask(b, h, line, column):
        row = line // each
        place = column - start
        at = place % W
        node = at - longest
        above = (words[row] >> node.clamp(0, 63)) & 1 == 1
        own_node = above & (node >= 0) & (node < nodes)
        mine = (place >= 0) & (place // W == slots[row])
        return (column < prompt) | (mine & ((at < lengths[slots[row]]) | own_node))

    lines = slots.shape[0] * each
    return create_block_mask(mask, None, None, lines, columns, device=slots.device)


@lru_cache(maxsize=1)
def _own_blocks(lengths, words, each, longest, nodes, columns):
    def mask(b, h, line, column):
        node = column - longest
        above = (words[b * nodes + line // each] >> node.clamp(0, 63)) & 1 == 1
        return (column < lengths[b]) | (above & (node >= 0) & (node < nodes))

    samples = lengths.shape[0]
    return create_block_mask(mask, samples, None, nodes * each, columns, device=lengths.device)


def _lines(q: torch.Tensor, job: Job) -> tuple[torch.Tensor, int, dict]:
    """Rearrange [B, R, H, D] for flex_attention.

    Returns queries [B, heads, lines, D], the number of lines per row, and options of the call.

    flex_attention's kernel for few rows processes the query heads of a key-value head together if
    their number is a power of two. Otherwise they become lines, as in csd's kernel, since separate
    heads would each read keys and values once more. That kernel makes one tile of all lines, and
    fails if a block of the mask is smaller; beyond 64 lines BLOCK_M makes several tiles.
    """
    each, few = job.shape.H // job.shape.K, q.shape[1] < FEW
    packs = each & (each - 1) == 0 and few
    if packs:
        lines = q.transpose(1, 2).contiguous()
    else:
        lines = q.unflatten(2, (-1, each)).transpose(1, 2).flatten(2, 3).contiguous()
    options = dict(enable_gqa=lines.shape[1] != job.shape.K)
    if lines.shape[2] < FEW and q.shape[1] * each > 64:
        options["kernel_options"] = {"BLOCK_M": 64}
    return lines, 1 if packs else each, options


def _heads(x: torch.Tensor, job: Job, each: int) -> torch.Tensor:
    """View of [B, heads, lines, ..] as [B, K, H / K, R, ..]."""
    if each == 1:
        return x.unflatten(1, (job.shape.K, -1))
    return x.unflatten(2, (-1, each)).transpose(2, 3)


def flex_one(job: Job):
    """One flex_attention call over the prompt and all samples' own keys, concatenated.

    Each part starts at a multiple of the mask's block, so that a block belongs to one sample.
    """
    s, scale = job.shape, job.shape.D**-0.5
    *own, longest = own_of(job, multiple=128)
    prompt = [F.pad(x, (0, 0, 0, 0, 0, -s.prompt % 128)) for x in prompt_of(job)]
    k, v = (
        torch.cat([p, x.flatten(0, 1)]).transpose(0, 1)[None].contiguous()
        for p, x in zip(prompt, own, strict=True)
    )
    W, start = own[0].shape[1], prompt[0].shape[0]
    q, each, options = _lines(job.q[None], job)
    tables = job.slot_len, job.ancestors, job.slot, each
    blocks = _line_blocks(*tables, s.prompt, start, W, longest, s.nodes, k.shape[2])
    flex = _fast(flex_attention, job)
    return (
        lambda: flex(q, k, v, block_mask=blocks, scale=scale, **options),
        lambda out: _heads(out, job, each)[0].permute(2, 0, 1, 3).reshape(s.rows, s.H, s.D),
    )


def flex_two(job: Job):
    """Two flex_attention calls and a merge: the prompt without a mask, own keys with one."""
    s, scale = job.shape, job.shape.D**-0.5
    k, v = (x.transpose(0, 1)[None].contiguous() for x in prompt_of(job))
    *own, longest = own_of(job, multiple=128)
    own_k, own_v = (x.transpose(1, 2).contiguous() for x in own)
    q, each, options = _lines(job.q[None], job)
    own_q, own_each, own_options = _lines(job.q.view(s.samples, s.nodes, s.H, s.D), job)
    tables = job.slot_len, job.ancestors, own_each
    blocks = _own_blocks(*tables, longest, s.nodes, own_k.shape[2])
    flex, combine = _fast(flex_attention, job), _fast(merge, job)
    common = dict(scale=scale, return_aux=AuxRequest(lse=True))

    def call():
        out, aux = flex(q, k, v, **common, **options)
        # both as [N, K, H / K, T, ..]
        by_sample = (
            _heads(x, job, each)[0].unflatten(2, (s.samples, -1)).movedim(2, 0)
            for x in (out, aux.lse)
        )
        mine, own_aux = flex(own_q, own_k, own_v, block_mask=blocks, **common, **own_options)
        own = (_heads(x, job, own_each) for x in (mine, own_aux.lse))
        return combine(*own, *by_sample)

    return call, lambda out: out.permute(0, 3, 1, 2, 4).reshape(s.rows, s.H, s.D)


RIVALS = {"sdpa": sdpa, "flex one call": flex_one, "flex two calls": flex_two}
FULL_RIVALS = {"sdpa, prompt copied": sdpa_copied}
# without compilation
QUICK_RIVALS = {"sdpa, eager merge": partial(sdpa, fused=False)}
