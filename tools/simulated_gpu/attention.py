"""PyTorch's attention kernels on the GPU of `simulated.py`."""

import torch
import torch.nn.functional as F


def attend(q, k, v, mask, scale):
    """[B, H, R, D] and log-sum-exps [B, H, R] in float32; keys may have fewer heads."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    score = q.float() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + mask
    return (score.softmax(-1) @ v).to(q.dtype), score.logsumexp(-1)


def flash(q, k, v, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Its causal mask ends where queries and keys do."""
    mask = torch.zeros(q.shape[2], k.shape[2])
    if is_causal:
        mask.masked_fill_(~lower_right(*mask.shape), float("-inf"))
    return attend(q, k, v, mask, scale)


def ragged(q, k, v, q_ends, k_ends, q_most, k_most, dropout, is_causal, debug, *, scale=None):
    """Flash attention of texts of several lengths, one behind the other: [R, H, D]."""
    cut_q, cut_k = ((x[1:] - x[:-1]).tolist() for x in (q_ends, k_ends))
    assert max(cut_q) <= q_most and max(cut_k) <= k_most and sum(cut_q) == q.shape[0]
    texts = zip(q.split(cut_q), k.split(cut_k), v.split(cut_k), strict=True)
    heads = ((x.transpose(0, 1)[None] for x in text) for text in texts)
    outputs = [flash(*text, dropout, is_causal, scale=scale) for text in heads]
    return torch.cat([out[0].transpose(0, 1) for out, _ in outputs]), outputs[0][1].new_zeros(0)


def efficient(q, k, v, bias, compute_log_sumexp, *, scale=None):
    out, lse = attend(q, k, v, bias.float(), scale)
    return out, F.pad(lse, (0, -q.shape[2] % 32))


def lower_right(rows: int, end: int) -> torch.Tensor:
    return torch.ones(rows, end, dtype=torch.bool).tril(end - rows)


def flash_operator(launch, name, args, kwargs):
    """Results in the operator's form: [B, H, R, D], log-sum-exps [B, H, R], and unused ones."""
    q, none = args[0], args[0].new_empty(0)
    like = [q, q.new_empty(q.shape[:-1], dtype=torch.float32)]
    out, lse = launch(flash, args, kwargs, like=like, name=name)
    return out, lse, none, none, q.shape[2], args[1].shape[2], none, none, none


def ragged_operator(launch, name, args, kwargs):
    q, none = args[0], args[0].new_empty(0)
    like = [torch.empty_like(q), q.new_empty(0, dtype=torch.float32)]
    return *launch(ragged, args, kwargs, like=like, name=name), none, none, none


def efficient_operator(launch, name, args, kwargs):
    """The same, of log-sum-exps for a multiple of 32 rows."""
    q, none = args[0], args[0].new_empty(0)
    rows = -(-q.shape[2] // 32) * 32
    like = [q, q.new_empty(*q.shape[:2], rows, dtype=torch.float32)]
    return *launch(efficient, args, kwargs, like=like, name=name), none, none


ATTENTION = {
    "_scaled_dot_product_flash_attention": flash_operator,
    "_flash_attention_forward": ragged_operator,
    "_scaled_dot_product_efficient_attention": efficient_operator,
}
