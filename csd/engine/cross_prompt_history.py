"""History that the prompts of one call share, with `share="call"`."""

from collections import OrderedDict

from csd.engine.requests import Request
from csd.engine.result import Sample
from csd.graph.history import PastSample

# most tokens of other prompts that enter one prompt's graph: bounds the time of an admission
MAX_TOKENS = 4096
# number of halvings of their weight
AGE = 2


class CrossPromptHistory:
    """The first finished sample of each prompt, cut to `MAX_TOKENS` tokens.

    One sample per prompt contains most of the text that prompts have in common. Memory is bounded
    by the tokens that one prompt may receive (2 x MAX_TOKENS), however many prompts finish.
    """

    def __init__(self) -> None:
        self._seen_prompts: set[int] = set()  # indices of requests with a finished sample
        self._samples: OrderedDict[int, PastSample] = OrderedDict()  # by index, oldest first
        self._size = 0  # tokens in `_samples`

    def add(self, request: Request, sample: Sample) -> None:
        """Keep a finished sample if it is the first of its prompt."""
        if request.index in self._seen_prompts:
            return
        self._seen_prompts.add(request.index)
        past = PastSample.of(sample.tokens[:MAX_TOKENS], age=AGE, other_prompt=True)
        self._samples[request.index] = past
        self._size += len(past)
        # a prompt never receives its own sample, which has at most MAX_TOKENS tokens
        while self._size - len(next(iter(self._samples.values()))) >= 2 * MAX_TOKENS:
            self._size -= len(self._samples.popitem(last=False)[1])

    def samples_for(self, request: Request) -> list[PastSample]:
        """Samples of other prompts for a request's graph, newest first, `MAX_TOKENS` in total."""
        samples, room = [], MAX_TOKENS
        for index, past in reversed(self._samples.items()):
            if index == request.index:
                continue
            if len(past) > room:
                break
            samples.append(past)
            room -= len(past)
        return samples


def max_graph_tokens(requests: list[Request], groups: int) -> int:
    """Upper bound on other prompts' tokens in the graph, for `groups` prompts in flight.

    In units of a prompt's own tokens: an own token enters a context of every order, a token of
    another prompt fewer than half as many contexts.
    """
    longest = max(r.params.max_new_tokens for r in requests)
    return groups * min(MAX_TOKENS, longest * (len(requests) - 1)) // 2
