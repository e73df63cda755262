"""What other prompts of a call said, with `share="call"`: drafts for the prompts admitted later."""

from collections import OrderedDict

from csd.engine.requests import Request
from csd.engine.result import Sample
from csd.graph.history import Earlier

# of other prompts that enter the graph of one, at most: what an admission takes is bounded by it
TOKENS = 4096
# their weight is halved so many times
HALVED = 2


class Shared:
    """The first sample of each prompt that finished, up to `TOKENS` tokens of it.

    What matters is what prompts have in common, and one sample of each has most of that. However
    many prompts a call has, no more is kept than what one could be told.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()  # indices of the requests that have told one
        self._said: OrderedDict[int, Earlier] = OrderedDict()  # by index, oldest first
        self._size = 0  # tokens in it

    def add(self, request: Request, sample: Sample) -> None:
        """Called when a sample has finished."""
        if request.index in self._known:
            return
        self._known.add(request.index)
        said = Earlier.of(sample.tokens[:TOKENS], halved=HALVED, foreign=True)
        self._said[request.index] = said
        self._size += len(said)
        # of what is kept, a prompt's own is not for it, and is TOKENS at most
        while self._size - len(next(iter(self._said.values()))) >= 2 * TOKENS:
            self._size -= len(self._said.popitem(last=False)[1])

    def of(self, request: Request) -> list[Earlier]:
        """What enters the graph of a request: of other prompts, newest first, `TOKENS` in all."""
        found, room = [], TOKENS
        for index, said in reversed(self._said.items()):
            if index == request.index:
                continue
            if len(said) > room:
                break
            found.append(said)
            room -= len(said)
        return found


def shared_tokens(requests: list[Request], groups: int) -> int:
    """That the graphs of so many prompts in flight have to hold of others, at most, counted as
    tokens of the prompts' own: these enter a context of every order, and others' less than half."""
    longest = max(r.params.max_new_tokens for r in requests)
    return groups * min(TOKENS, longest * (len(requests) - 1)) // 2
