"""The two launches of the exact attention: partial results of the cuts, then the tails."""

import math

import torch
import triton
import triton.language as tl

from csd.kernels.exact_attention.constants import TAIL
from csd.kernels.exact_attention.pages import _pages_kernel
from csd.kernels.exact_attention.plan import ExactWork, cuts, plan_exact_triton
from csd.kernels.exact_attention.tail import _tail_kernel
from csd.kernels.gpu_target import chip_of
from csd.kernels.tree_attention.launch import DTYPES, Partials, _tiles
from csd.kernels.tree_attention.layout import TreeLayout
from csd.kernels.tree_attention.plan import programs_for
from csd.state.kv_cache import PAGE

# keys of a tail that are read at once
TAIL_KEYS = 32


def empty_exact_partials(layout: TreeLayout, H: int, K: int, DV: int) -> Partials:
    """Allocates the partial results of all cuts of a pool."""
    R = max(1, sum(cuts(layout))) * layout.slot.shape[0] * (H // K)
    device = layout.slot.device
    return Partials(
        torch.empty(K, R, DV, dtype=torch.float32, device=device),
        torch.empty(K, R, dtype=torch.float32, device=device),
    )


def exact_attention_triton(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, Dv]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    layout: TreeLayout,
    scale: float,
    work: ExactWork | None = None,
    programs: int | None = None,
    out: torch.Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Returns [M, H, Dv]. Two launches, and one or two more to make `work` if it is None.

    work: of `plan_exact_triton`. programs: per key-value head, to walk the segments; results do not
    depend on it. Raises ValueError if q is not float16, bfloat16 or float32.
    """
    (M, H, D), (K, DV), G = q.shape, node_v.shape[1:], layout.prompt_len.shape[0]
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    out = torch.empty(M, H, DV, dtype=q.dtype, device=q.device) if out is None else out
    if M == 0:
        return out
    if work is None:
        work = plan_exact_triton(layout, heads=H, kv_heads=K, window=window, chunk=chunk)
    programs = programs or programs_for(q.device, K)
    partials = empty_exact_partials(layout, H, K, DV)
    dtype = DTYPES[q.dtype]
    tiles = _tiles(chip_of(q.device), dtype, max(D, DV))
    # the interpreter computes wrong bfloat16 products without an error: use float32 there
    wide = dtype == "bf16" and not isinstance(_pages_kernel, triton.JITFunction)
    common = dict(
        q_ptr=q,
        k_pages_ptr=k_pages,
        v_pages_ptr=v_pages,
        row_ptr=work.row,
        first_ptr=work.first,
        o_ptr=partials.o,
        lse_ptr=partials.lse,
        q_stride=q.stride(0),
        partial_rows=partials.lse.shape[1],
        scale=scale / softcap if softcap else scale * math.log2(math.e),
        cap=(softcap or 0.0) * math.log2(math.e),
        H=H,
        K=K,
        D=D,
        DV=DV,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_V=max(16, triton.next_power_of_2(DV)),
        DTYPE=tl.float32 if wide else getattr(tl, str(q.dtype).removeprefix("torch.")),
        PRECISION="ieee" if dtype == "fp32" else "tf32",
        CAP=softcap is not None,
        # else a product and a sum could be fused in one copy of a loop and not in another
        enable_fp_fusion=False,
    )
    _pages_kernel[(programs * K,)](
        prompt_pages_ptr=layout.prompt_pages,
        prompt_len_ptr=layout.prompt_len,
        slot_pages_ptr=layout.slot_pages,
        segment_ptr=work.segment,
        count_ptr=work.total,
        G=G,
        prompt_width=layout.prompt_pages.stride(0),
        slot_width=layout.slot_pages.stride(0),
        programs=programs,
        PAGE=PAGE,
        **tiles,
        **common,
    )
    _tail_kernel[(M, K)](
        node_k_ptr=node_k,
        node_v_ptr=node_v,
        tail_ptr=work.tail,
        sinks_ptr=sinks,
        out_ptr=out,
        node_stride=node_k.stride(0),
        node_v_stride=node_v.stride(0),
        M=M,
        prompt_cuts=cuts(layout)[0],
        TAIL=TAIL,
        BLOCK_E=max(16, triton.next_power_of_2(H // K)),
        BLOCK_N=TAIL_KEYS,
        num_warps=4,
        # for float32 the loads of one iteration fill the shared memory
        num_stages=1 if dtype == "fp32" else 2,
        **common,
    )
    return out
