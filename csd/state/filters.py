"""Filters of a sample's distribution: declared here, applied by `csd/kernels/verify/`.

A filter is one entry of `FilterOptions`, whose value is a number. Each has a tensor of that name in
`csd.state.slots.Slots`, float64 or, for a whole number, int32. The order of the entries is that in
which filters apply, as in transformers; the repetition penalty comes before all of them.
"""

from functools import partial
from typing import Annotated, Any, TypedDict, get_args

import torch

from csd.utils.arguments import (
    LARGEST,
    STEEPEST,
    Option,
    check_number,
    check_temperature,
    check_whole,
    options_of,
)


def _check_temperature(name: str, value: Any) -> float:
    is_greedy = check_number(name, value, 0, STEEPEST) == 0
    return value if is_greedy else check_temperature(name, value)


def _check_top_k(name: str, value: Any) -> int:
    # LARGEST exceeds every vocabulary
    return min(check_whole(name, value, 0), LARGEST)


class FilterOptions(TypedDict, total=False):
    """Arguments for drawing a token that a model's generation config may set."""

    temperature: Annotated[
        float | None,
        Option(
            None,
            "sampling temperature; 0 is greedy. By default the value of the model's generation "
            "config, else 1. Temperature, top-k, top-p, min-p and repetition penalty are defined "
            "as in transformers",
            _check_temperature,
            float,
            off=1.0,
            config="temperature",
            processor="TemperatureLogitsWarper.temperature",
            fields="temperature",
        ),
    ]
    top_k: Annotated[
        int | None,
        Option(
            None,
            "keep the k most likely tokens, and all tokens tied with the last of them; 0 is off. "
            "By default the value of the generation config, else off",
            _check_top_k,
            int,
            off=0,
            config="top_k",
            processor="TopKLogitsWarper.top_k",
            fields="top_k",
        ),
    ]
    top_p: Annotated[
        float | None,
        Option(
            None,
            "nucleus sampling: keep the most likely tokens whose probabilities sum to this value; "
            "1 is off. By default the value of the generation config, else off",
            partial(check_number, low=0, high=1),
            float,
            off=1.0,
            config="top_p",
            processor="TopPLogitsWarper.top_p",
            fields="top_p",
        ),
    ]
    min_p: Annotated[
        float | None,
        Option(
            None,
            "minimum probability of a token, relative to the most likely one; 0 is off",
            partial(check_number, low=0, high=1),
            float,
            off=0.0,
            config="min_p",
            processor="MinPLogitsWarper.min_p",
            fields="min_p",
        ),
    ]
    typical_p: Annotated[
        float | None,
        Option(
            None,
            "locally typical sampling: of the tokens that the other filters keep, those whose "
            "surprise -log p is nearest to its mean, the entropy, up to this sum of probabilities, "
            "and all tokens tied with the last of them; 1 is off",
            partial(check_number, low=0, high=1),
            float,
            off=1.0,
            config="typical_p",
            processor="TypicalLogitsWarper.mass",
            fields="typical_p",
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        Option(
            None,
            "penalty on tokens that the prompt or the sample already contains; 1 is off",
            partial(check_number, low=1 / STEEPEST, high=STEEPEST),
            float,
            off=1.0,
            config="repetition_penalty",
            processor="RepetitionPenaltyLogitsProcessor.penalty",
            fields="repetition_penalty",
        ),
    ]


# the value of each filter that turns it off; temperature 1 changes nothing
FILTERS: dict[str, Any] = {name: o.off for name, (_, o) in options_of(FilterOptions).items()}
# the filters that drop tokens
CUTS = {
    name: off for name, off in FILTERS.items() if name not in ("temperature", "repetition_penalty")
}
# the filters that keep a share of the probability, none of which is 0
SHARES = ("top_p", "typical_p")
# options of greedy decoding
GREEDY: dict[str, Any] = {"temperature": 0}


def dtype_of(name: str) -> torch.dtype:
    """Dtype of a filter's tensor; float64 holds the user's value."""
    return torch.int32 if int in get_args(options_of(FilterOptions)[name][0]) else torch.float64


def is_greedy(slots: Any, s: torch.Tensor) -> torch.Tensor:
    """[R] bool: whether the slots s [R] decode greedily."""
    return slots.temperature[s] == 0
