"""The same job composed of FlashInfer or xFormers calls; ImportError if the package is absent."""

import torch

from bench.micro.jobs.attention_job import Job
from bench.micro.jobs.attention_rivals import own_of, prompt_of


def flashinfer(job: Job):
    """FlashInfer: two prefill calls, merged in place.

    One is over the prompt, the other ragged, with a custom mask, over each sample's own keys; it is
    planned outside the measurement.
    """
    import flashinfer as fi

    s, device = job.shape, job.q.device
    k, v = (x.contiguous() for x in prompt_of(job))
    *own, longest = own_of(job, multiple=1)
    counts = [n + s.nodes for n in job.lengths]
    # a sample's committed keys are directly followed by its nodes'
    own_k, own_v = (
        torch.cat(
            [
                torch.cat([x[i, :n], x[i, longest : longest + s.nodes]])
                for i, n in enumerate(job.lengths)
            ]
        )
        for x in own
    )
    words = job.ancestors.view(s.samples, s.nodes, 1)
    above = (words >> torch.arange(s.nodes, device=device)) & 1 == 1
    masks = [
        torch.cat([above.new_ones(s.nodes, n), above[i]], 1).flatten()
        for i, n in enumerate(job.lengths)
    ]
    rows = torch.arange(s.samples + 1, dtype=torch.int32, device=device) * s.nodes
    columns = torch.tensor([0, *counts], device=device).cumsum(0).int()
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD")
    wrapper.plan(
        rows,
        columns,
        s.H,
        s.K,
        s.D,
        custom_mask=torch.cat(masks),
        q_data_type=job.q.dtype,
    )

    def call():
        out, lse = fi.single_prefill_with_kv_cache(job.q, k, v, return_lse=True)
        other, other_lse = wrapper.run(job.q, own_k, own_v, return_lse=True)
        fi.merge_state_in_place(out, lse, other, other_lse)
        return out

    return call, lambda out: out


def xformers(job: Job):
    """xFormers: partial attention over prompt, committed keys and nodes, merged in one call."""
    from xformers.ops import fmha

    s = job.shape
    each = s.H // s.K

    def grouped(x, batch):
        """View of [tokens, K, D] as [batch, .., K, H / K, D]."""
        return x.view(batch, -1, s.K, 1, s.D).expand(-1, -1, -1, each, -1)

    k, v = (grouped(x.contiguous(), 1) for x in prompt_of(job))
    *own, longest = own_of(job, multiple=1)
    own_k, own_v = (grouped(x[:, :longest].flatten(0, 1), 1) for x in own)
    node_k, node_v = (grouped(x, s.samples) for x in (job.node_k, job.node_v))
    q = job.q.view(1, s.rows, s.K, each, s.D)
    node_q = job.q.view(s.samples, s.nodes, s.K, each, s.D)
    padded = fmha.attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[s.nodes] * s.samples, kv_padding=longest, kv_seqlen=job.lengths
    )
    words = job.ancestors.view(s.samples, 1, 1, s.nodes, 1)
    above = (words >> torch.arange(s.nodes, device=job.q.device)) & 1 == 1
    # a row of the bias must start at a multiple of 8 elements
    bias = job.q.new_full((s.samples, s.K, each, s.nodes, -(-s.nodes // 8) * 8), float("-inf"))
    bias = bias[..., : s.nodes]
    bias.masked_fill_(above.expand(bias.shape), 0)
    partial = fmha.memory_efficient_attention_partial

    def call():
        out, lse = partial(q, k, v)
        own_out, own_lse = partial(q, own_k, own_v, padded)
        node_out, node_lse = partial(node_q, node_k, node_v, bias)
        # [N, K, H / K, T] to [1, K, H / K, M]
        node_lse = node_lse.permute(1, 2, 0, 3).reshape(1, s.K, each, s.rows)
        parts = [out, own_out, node_out.reshape(q.shape)], [lse, own_lse, node_lse]
        return fmha.merge_attentions(*parts, write_lse=False)[0]

    return call, lambda out: out.view(s.rows, s.H, s.D)


OTHERS = {"flashinfer": flashinfer, "xformers": xformers}
