"""`csd.DraftModel`: a smaller model with the same vocabulary, as the `drafter` of a call.

Its network is that of the model (`ModelNetwork`), or of the model's first layers (`first_layers`).
"""

import copy
import os
from dataclasses import replace
from typing import Any

import torch

from csd.graph.consensus import ConsensusGraph
from csd.graph.drafter import DraftSpec
from csd.kernels.ops import Ops
from csd.models.fused.decoder import Decoder, DecoderLike
from csd.models.load import Loaded, load
from csd.research.draft_models.cache import DraftNetwork
from csd.research.draft_models.device_drafter import DeviceModelDrafter
from csd.research.draft_models.drafter import ModelDrafter, NetworkDrafter
from csd.state.pool import MAX_CHILDREN, MAX_DEPTH
from csd.utils.arguments import check_flag, check_temperature, check_whole
from csd.utils.check import shown


def first_layers(decoder: DecoderLike, layers: int) -> Decoder:
    """Make a decoder of the first layers, with the last norm and head; no weight is copied."""
    if not isinstance(decoder, Decoder):
        raise TypeError(f"layers needs a csd Decoder, got {type(decoder).__name__}")
    if not 1 <= layers <= len(decoder.layers):
        raise ValueError(f"layers must be from 1 to {len(decoder.layers)}, got {shown(layers)}")
    made = copy.copy(decoder)
    made.layers, made.taps, made.tapped = decoder.layers[:layers], (), {}
    made.config = replace(decoder.config, layers=layers)
    return made


class ModelNetwork(DraftNetwork):
    """A draft model, without the target's hidden states."""

    def __init__(self, decoder: DecoderLike, dtype: torch.dtype):
        self.decoder, self.config, self.dtype = decoder, decoder.config, dtype
        if getattr(self.config, "states", None) is not None:
            family = self.config.family
            raise ValueError(f"a draft model must have no layers with a state, got a {family!r}")

    def forward(
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        hidden: torch.Tensor | None,
        attend: Any,
        node_k: torch.Tensor,
        node_v: torch.Tensor,
        ops: Ops,
    ) -> torch.Tensor:
        # clamp positions beyond the context, also those of nodes that no slot has room for
        position = position.clamp(max=self.config.context - 1)
        return self.decoder.forward(token, position, attend, node_k, node_v, ops)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(hidden)

    def start_call(self) -> None:
        if isinstance(self.decoder, Decoder):
            self.decoder.begin_call()


class NetworkSpec(DraftSpec):
    """Settings of a drafting network.

    k, depth: with "match", a tree of `depth` levels, in which `k` paths of a sample continue from
    each level to the next and every node has at most `k` children; k = 1 is a chain. With
    multi-draft verifiers, `k` independent sequences of `depth` tokens.
    temperature: temperature of the drafts; None means the samples' own. Multi-draft verifiers also
    accept one per sequence.
    graph: with "match", True if the consensus graph drafts too; nodes of both enter one pool,
    ranked by measured reliability.
    """

    def __init__(
        self,
        *,
        k: int = 4,
        depth: int = 5,
        temperature: float | tuple[float, ...] | list[float] | None = None,
        graph: bool = False,
    ):
        self.k = check_whole("k", k, 1, MAX_CHILDREN)
        self.depth = check_whole("depth", depth, 1, MAX_DEPTH)
        self.temperature = self._temperatures(temperature)
        self.graph = check_flag("graph", graph)

    def _temperatures(self, value: Any) -> Any:
        if not isinstance(value, tuple | list):
            return None if value is None else check_temperature("temperature", value)
        checked = tuple(check_temperature("temperature", t) for t in value)
        if len(checked) != self.k:
            raise ValueError(
                f"temperature must have one entry for each of k={self.k}, got {shown(value)}"
            )
        return checked

    def _network(self, device: str | torch.device) -> DraftNetwork:
        """The network, loaded to the device."""
        raise NotImplementedError

    def make(
        self, ops: Ops, device: str | torch.device, tokens: int = 0, history: bool = False
    ) -> NetworkDrafter:
        """The drafter of the network: on the device where it can be, else on the host."""
        net = self._network(device)
        settings: dict[str, Any] = dict(
            k=self.k, depth=self.depth, temperature=self.temperature, name=repr(self)
        )
        several = isinstance(self.temperature, tuple)
        if torch.device(device).type == "cuda" and not self.graph and not several:
            return DeviceModelDrafter(net, ops, device, **settings)
        graph = ConsensusGraph(ops, device, tokens=tokens, history=history) if self.graph else None
        return ModelDrafter(net, ops, device, graph=graph, **settings)


class DraftModel(NetworkSpec):
    """A draft model, with a cache of its own.

    model: as in `csd.generate`: a `transformers` model, a folder, a hub name, a GGUF file or a
    `csd.models` Decoder. It is loaded once, by the first call that drafts with it. layers: use
    only this number of its first layers, with its last norm and head. dtype, revision: for a model
    given by name. Alone and on a GPU it drafts without the host, so its steps are captured.

    The other arguments are those of `NetworkSpec`. Raises ValueError for unsupported arguments; the
    call raises ValueError if the vocabularies differ in size, naming both.
    """

    def __init__(
        self,
        model: Any,
        *,
        k: int = 4,
        depth: int = 5,
        temperature: float | tuple[float, ...] | list[float] | None = None,
        graph: bool = False,
        layers: int | None = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
    ):
        super().__init__(k=k, depth=depth, temperature=temperature, graph=graph)
        layers = None if layers is None else check_whole("layers", layers, 1)
        self.model, self.layers, self.dtype, self.revision = model, layers, dtype, revision
        self._loaded: Loaded | None = None

    def __repr__(self) -> str:
        named = isinstance(self.model, str | os.PathLike)
        model = repr(os.fspath(self.model)) if named else type(self.model).__name__
        return f"DraftModel({model}, k={self.k}, depth={self.depth})"

    def _network(self, device: str | torch.device) -> ModelNetwork:
        if self._loaded is None:
            target = device if isinstance(self.model, str | os.PathLike) else None
            self._loaded = load(self.model, dtype=self.dtype, device=target, revision=self.revision)
        loaded = self._loaded
        loaded.refresh()
        if loaded.device != torch.device(device):
            raise ValueError(
                f"drafter must be on the model's device {device}, got {self!r} on {loaded.device}"
            )
        decoder = loaded.decoder
        if self.layers is not None:
            decoder = first_layers(decoder, self.layers)
        return ModelNetwork(decoder, loaded.dtype)
