"""What ranks tell each other besides numbers: rank 0's orders, and what went wrong on any of them.

A call begins with `meet`: every rank says what it was asked for, or why it refuses, and where that
differs the call fails on all of them. Within it rank 0 sends orders. What follows an order stands
in `together`: the ranks exchange what the order asks for even if one of them raises, and agree
afterwards that none has. So a rank that raises is heard of at the end of the same pass, by name,
and the ranks can go on with another call. What goes wrong inside an exchange itself (a lost
connection, no memory for what is gathered) is left to torch.distributed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Exchange = Callable[[], Any]


class Link:
    """The ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh):
        self.rank, self.group = mesh.get_local_rank(), mesh.get_group()
        self.device = torch.device(mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._source = dist.get_global_rank(self.group, 0)
        self._left: deque[Exchange] = deque()
        # nothing more is to be said of an error: all ranks know, or none can be told
        self.silent = False

    def meet(self, asked: dict | None, refused: BaseException | None = None) -> None:
        """Begin a call. asked: by name, what must be the same everywhere.

        Raises `refused` where there is one, else RuntimeError with the first rank that refused, or
        ValueError with the first difference.
        """
        self.silent = False
        self._left.clear()
        every = self._gather((asked, refused and error_text(refused)))
        if refused is not None:
            raise refused
        self._raise_first("refused the call", [text for _, text in every])
        first = every[0][0]
        for rank, (other, _) in enumerate(every):
            for name, value in first.items():
                if other[name] != value:
                    raise ValueError(
                        f"{name} must be the same on all ranks, got {value!r} on rank 0 and "
                        f"{other[name]!r} on rank {rank}"
                    )

    def send(self, order: str, what: object) -> None:
        self._broadcast([order, _to(what, "cpu")])

    def receive(self) -> tuple:
        order, what = self._broadcast([None, None])
        return order, _to(what, self.device)

    @contextmanager
    def together(self, exchanges: list[Exchange]) -> Iterator[None]:
        """Within it every rank makes `exchanges`, in this order and each through `exchange`.

        Where a rank raises before it has made them, they are made in its place, with whatever is in
        them. Raises what was raised within, or RuntimeError with the first rank on which it was.
        """
        error = None
        self._left = deque(exchanges)
        try:
            yield
        except BaseException as raised:
            if self.silent:
                raise
            error = raised
        while self._left:
            self.exchange(self._left[0])
        self.agree(error)

    def exchange(self, make: Exchange) -> Any:
        """The next of the exchanges, made by `make`."""
        try:
            result = make()
        except BaseException:
            self.silent = True
            raise
        if self._left:
            self._left.popleft()
        return result

    def agree(self, error: BaseException | None) -> None:
        """Raises on all ranks when one of them comes with an error: its own there."""
        failed = torch.tensor(int(error is not None), device=self.device)
        self.exchange(lambda: dist.all_reduce(failed, dist.ReduceOp.MAX, self.group))
        if not int(failed):
            return
        every = self._gather(error and error_text(error))
        self.silent = True
        if error is not None:
            raise error
        self._raise_first("failed", every)

    def _raise_first(self, what: str, texts: list[str | None]) -> None:
        for rank, text in enumerate(texts):
            if text is not None:
                raise RuntimeError(f"rank {rank} {what}: {text}")

    def _gather(self, mine: object) -> list:
        every = [None] * dist.get_world_size(self.group)
        self.exchange(lambda: dist.all_gather_object(every, mine, self.group))
        return every

    def _broadcast(self, box: list) -> list:
        self.exchange(
            lambda: dist.broadcast_object_list(
                box, src=self._source, group=self.group, device=self.device
            )
        )
        return box


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _to(what: Any, device: str | torch.device) -> Any:
    if torch.is_tensor(what):
        return what.to(device)
    if isinstance(what, dict):
        return {k: _to(v, device) for k, v in what.items()}
    return tuple(_to(v, device) for v in what) if isinstance(what, tuple) else what
