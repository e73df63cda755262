"""What other prompts of a call said, with `share="call"`: drafts for the prompts admitted later."""

from csd.engine.requests import Request
from csd.engine.result import Sample
from csd.graph.history import Earlier

# of other prompts that enter the graph of one, at most: more gain nothing (`bench.share_call`)
TOKENS = 4096
# their weight is halved so many times
HALVED = 2


class Shared:
    """The first sample of each prompt that finished, up to `TOKENS` tokens of it.

    What matters is what prompts have in common, and one sample of each has most of that.
    """

    def __init__(self) -> None:
        self._said: dict[int, Earlier] = {}  # by the request's index, in the order of finishing

    def add(self, request: Request, sample: Sample) -> None:
        """Called when a sample has finished."""
        if request.index not in self._said:
            self._said[request.index] = Earlier.of(
                sample.tokens[:TOKENS], halved=HALVED, foreign=True
            )

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
