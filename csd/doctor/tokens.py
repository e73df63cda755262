"""Comparison of the tokens of two runs of the same requests."""

from typing import NamedTuple

import torch

from csd.engine.requests.request import Request
from csd.engine.results.result import Sample
from csd.kernels.common.noise import SAMPLE, gumbel, philox_words_ref


class Difference(NamedTuple):
    """The first token at which two runs of a sample differ."""

    prompt: int
    sample: int
    token: int  # position of the token in the sample
    gap: float  # difference between the scores of the two tokens

    def __str__(self) -> str:
        return f"sample {self.sample} of prompt {self.prompt} from token {self.token} on"


def differences(want: list[Request], got: list[Request]) -> list[Difference]:
    """The first difference of every sample whose tokens differ.

    Each run drew the token with the largest log-probability + noise by its own logits. The gap is
    the difference between the scores of the two drawn tokens, each from the run that drew it.
    """
    differing = []
    for request, other in zip(want, got, strict=True):
        for a, b in zip(request.result(), other.result(), strict=True):
            if a.tokens != b.tokens:
                differing.append(_first(request, a, b))
    return differing


def _first(request: Request, a: Sample, b: Sample) -> Difference:
    pairs = zip(a.tokens, b.tokens, strict=False)
    index = next((t for t, (x, y) in enumerate(pairs) if x != y), None)
    if index is None:
        # one sample ended earlier, which no score explains
        index, gap = min(len(a.tokens), len(b.tokens)), float("inf")
    else:
        gap = abs(_score(request, a, index) - _score(request, b, index))
    return Difference(request.index, a.index, index, gap)


def _score(request: Request, sample: Sample, generated: int) -> float:
    key, token, position, index = (
        torch.tensor([n]) for n in (request.key, sample.tokens[generated], generated, sample.index)
    )
    word = philox_words_ref(key, token, position, index, SAMPLE)
    scale = request.params.temperature
    return sample.logprobs[generated] + (float(gumbel(word, torch.float64)) if scale else 0.0)
