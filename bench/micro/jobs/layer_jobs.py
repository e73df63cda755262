"""Jobs of a decoder layer's row-wise operations: norm, rotary embedding, SwiGLU."""

import torch

from bench.micro.jobs.step_state import StepJob, bytes_of, check_near
from csd.kernels.ops import reference


def rms_norm(ops, shape, sizes, device, dtype, seed):
    x, residual = (_normal(sizes.rows, shape.hidden, device, dtype, seed + i) for i in range(2))
    weight = _normal(1, shape.hidden, device, dtype, seed + 2)[0]

    def check():
        y, r = ops.rms_norm(x, weight, 1e-5, residual)
        assert torch.equal(r, x + residual), "the sum differs"
        wide = r.cpu().double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.cpu().double()
        check_near(y, exact)

    moved = 4 * bytes_of(x) + bytes_of(weight)
    name = f"M={sizes.rows} F={shape.hidden}"
    return StepJob(name, moved, moved, lambda: ops.rms_norm(x, weight, 1e-5, residual), check)


def rotary(ops, shape, sizes, device, dtype, seed):
    M, H, K, D = sizes.rows, shape.heads, shape.kv_heads, shape.head_dim
    qkv = _normal(M, (H + 2 * K) * D, device, dtype, seed)
    # a row of q, k and v is one fused row, as in the engine
    q, k, v = (x.view(M, -1, D) for x in qkv.split((H * D, K * D, K * D), dim=-1))
    frequency = 1e4 ** (-torch.arange(D, device=device) / D)
    angle = torch.arange(4096, device=device)[:, None] * frequency
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    position = (torch.arange(M, device=device) * 13 % 4096).int()
    node_k, node_v = (torch.empty(M, K, D, dtype=dtype, device=device) for _ in "kv")
    arguments = q, k, v, position, cos, sin, node_k, node_v

    def check():
        out = ops.rotary(*arguments)
        wide = [x.cpu().double() if x.is_floating_point() else x.cpu() for x in arguments]
        exact = reference().rotary(*wide)
        check_near(out, exact)
        check_near(node_k, wide[6])
        assert torch.equal(node_v, v), "values differ"

    moved = 2 * bytes_of(qkv) + 2 * M * D * dtype.itemsize
    name = f"M={M} H={H} K={K} D={D}"
    return StepJob(name, moved, moved, lambda: ops.rotary(*arguments), check)


def swiglu(ops, shape, sizes, device, dtype, seed):
    x = _normal(sizes.rows, 2 * shape.intermediate, device, dtype, seed)

    def check():
        check_near(ops.swiglu(x), reference().swiglu(x.cpu().double()))

    moved = bytes_of(x) * 3 // 2
    name = f"M={sizes.rows} F={shape.intermediate}"
    return StepJob(name, moved, moved, lambda: ops.swiglu(x), check)


def _normal(rows, width, device, dtype, seed) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=device).to(dtype)
