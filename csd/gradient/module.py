"""A user's own module over packed rows, with gradients: the shared prompt runs once.

The module computes all but its attention, which is that of packed rows. Its products
take any number of rows, so values equal those of the module's sampling up to rounding.
"""

from typing import Any

import torch
from torch import nn

from csd.gradient.rows import Rows
from csd.kernels.attention.packed import PackedLayout, packed_attention
from csd.models.module.decoder import ModuleDecoder, Pass
from csd.models.redirect import calls_go_to


class ModulePass:
    """One differentiable pass of a module over `Rows`."""

    def __init__(self, decoder: ModuleDecoder):
        if decoder.mixers:
            raise NotImplementedError(
                f"model must have no layers with a state, got a {decoder.config.family}: their "
                "state after a prompt has no gradient in csd"
            )
        self.decoder = decoder

    def logits(self, rows: Rows) -> torch.Tensor:
        """Logits [R, V] of all rows."""
        decoder = self.decoder
        ids, position = rows.token.long()[None], rows.position.long()[None]
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)

        def once() -> torch.Tensor:
            answer = _PackedPass(decoder, rows)
            with calls_go_to(answer, decoder.parts):
                logits = decoder.run(ids, position, mask)
            answer.end()
            of_rows: torch.Tensor = logits[0]
            return of_rows

        return decoder.adapters.run(once)


class _PackedPass(Pass):
    __slots__ = ("kv", "rows")

    def __init__(self, decoder: ModuleDecoder, rows: Rows):
        super().__init__(decoder.calls, None, None, None, None)
        self.rows = rows
        # keys and values by call, for later calls that share them
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        named: dict[str, Any],
    ) -> torch.Tensor:
        spec = self._next(module, query, key, value, mask, named).spec
        own = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.kv.append(own if spec.shares is None else self.kv[spec.shares])
        sinks = named["s_aux"] if spec.sinks else None
        out = packed_attention(
            query[0].transpose(0, 1),
            *self.kv[-1],
            PackedLayout(self.rows.end, self.rows.position),
            spec.scale,
            window=spec.window,
            chunk=spec.chunk,
            softcap=spec.softcap,
            sinks=sinks,
        )[0]
        return out.to(query.dtype).contiguous()[None]
