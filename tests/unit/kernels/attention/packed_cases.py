"""Packed samples of random prompts and completions, their mask token by token, and a plain pass."""

from functools import cache
from types import SimpleNamespace

import torch

from csd.kernels.attention.packed import pack_rows

# prompts' lengths, and their completions' lengths
SHAPES = {
    "one-row": ([1], [[0]]),
    "one-sample": ([5], [[70]]),
    "no-completion": ([9], [[0, 0]]),
    "samples": ([37], [[20, 3, 0, 41]]),
    "long-prompt": ([150], [[4, 4, 4]]),
    "prompts": ([1, 30], [[9, 8, 7], [40, 12]]),
}
PROPERTIES = {
    "none": {},
    "window": dict(window=7),
    "window-1": dict(window=1),
    "chunk": dict(chunk=8),
    "cap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "all": dict(window=20, chunk=64, softcap=3.0, sinks=True),
}


@cache
def samples(name, tokens=2):
    """Prompts and completions of few different tokens: many samples have prefixes in common."""
    g = torch.Generator().manual_seed(len(name))
    prompts, completions = SHAPES[name]

    def draw(n, count):
        return torch.randint(count, (n,), generator=g).tolist()

    return [draw(n, 9) for n in prompts], [[draw(n, tokens) for n in of] for of in completions]


@cache
def packed_samples(name):
    return pack_rows(*samples(name))


@cache
def visible_by_tokens(name, window=None, chunk=None):
    """[R, R] bool: a row attends to those of its sample's tokens up to its own, by walking them."""
    (prompts, _), packed = samples(name), packed_samples(name)
    R = len(packed.token)
    seen = torch.zeros(R, R, dtype=torch.bool)
    parents = dict(parent_rows(prompts, packed))
    for row in range(R):
        path, node = [], row
        while node is not None:
            path.append(node)
            node = parents[node]
        last = len(path) - 1
        for back, key in enumerate(path):
            near = window is None or back < window
            seen[row, key] = near and (chunk is None or last // chunk == (last - back) // chunk)
    return seen


def parent_rows(prompts, packed):
    """(row, the row before it in its sample) of every row."""
    for prompt, rows in zip(prompts, packed.rows, strict=True):
        last = int(rows[0][0])
        first = last - len(prompt) + 1
        yield first, None
        for row in range(first + 1, last + 1):
            yield row, row - 1
        for of_sample in rows:
            for before, row in zip(of_sample.tolist(), of_sample.tolist()[1:], strict=False):
                yield row, before


def packed_case(name, named="none", heads=(6, 2), D=16, value_dim=None, dtype=torch.float64):
    """Operands, and the results and gradients of a plain pass in float64.

    The plain pass has the mask of `visible_by_tokens` and autograd's backward.
    """
    packed = packed_samples(name)
    (H, K), R = heads, len(packed.token)
    g = torch.Generator().manual_seed(R)
    sizes = (H, D), (K, D), (K, value_dim or D), (H, value_dim or D)
    q, k, v, grad = (torch.randn(R, *size, generator=g, dtype=torch.float64) for size in sizes)
    properties = dict(window=None, chunk=None, softcap=None, sinks=None) | PROPERTIES[named]
    if properties["sinks"]:
        properties["sinks"] = torch.randn(H, generator=g, dtype=torch.float64).to(dtype)
    case = SimpleNamespace(
        q=q.to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        grad=grad.to(dtype),
        layout=packed.layout,
        scale=D**-0.5,
        properties=properties,
        seen=visible_by_tokens(name, properties["window"], properties["chunk"]),
    )
    case.want = plain_pass(case, torch.float64)
    return case


def plain_pass(case, dtype):
    """out, lse, dq, dk, dv and dsinks of PyTorch's autograd in a dtype, with products in it."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]
    q, k, v = leaves
    sinks, softcap = case.properties["sinks"], case.properties["softcap"]
    if sinks is not None:
        sinks = sinks.detach().to(dtype).requires_grad_()
        leaves.append(sinks)
    each = q.shape[1] // k.shape[1]
    # [H, R, ..]
    keys, values = (x.repeat_interleave(each, 1).transpose(0, 1) for x in (k, v))
    score = (q.transpose(0, 1) @ keys.mT * case.scale).to(torch.promote_types(dtype, torch.float32))
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~case.seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(score.dtype)[:, None, None].expand(-1, score.shape[1], 1)
        score = torch.cat((score, column), -1)
    weight = score.softmax(-1)[..., : keys.shape[1]]
    out = (weight.to(dtype) @ values).transpose(0, 1)
    out.backward(case.grad.to(dtype))
    lse = score.detach().logsumexp(-1).T
    dsinks = [x.grad for x in leaves[3:]] or [q.new_empty(0)]
    return [out.detach(), lse, *(x.grad for x in leaves[:3]), *dsinks]
