"""Arguments for drafts: none of them changes a token with the verifier `match`."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike
from typing import Annotated, Any, TypedDict

from csd.engine.history_args import check_history
from csd.engine.options.checks import check_drafter, check_prior
from csd.engine.options.option import Option
from csd.engine.result import Samples
from csd.engine.traces.history import History
from csd.graph.drafter_registry import names
from csd.graph.prior import Prior
from csd.schema.arguments import check_budget, check_flag, check_one_of
from csd.verify.multi_draft import DRAWS

VERIFIERS = ("match", *DRAWS)


def read_budget(text: str) -> str | int:
    """Parse a budget of the command line."""
    if text != "auto" and not text.isdecimal():
        raise ArgumentTypeError(f"must be 'auto' or a whole number, got {text!r}")
    return text if text == "auto" else int(text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


class DraftingOptions(TypedDict, total=False):
    """Arguments that decide what is drafted and how it is verified."""

    speculate: Annotated[
        bool, Option(True, "use speculative decoding", partial(check_flag, "speculate"), bool)
    ]
    verifier: Annotated[
        str,
        Option(
            "match",
            "how drafts are verified. The default accepts a draft only where it equals the "
            "model's own sample. `canonical`, `recursive`, `kseq` and `single` draw drafts from "
            "the graph or from a draft model, and accept or resample them (`csd.verify`). They "
            "keep the samples' distribution, but tokens depend on siblings, batch and budget, and "
            "a seed repeats them only for the same call with an integer `budget`",
            partial(check_one_of, "verifier", names=VERIFIERS),
        ),
    ]
    drafter: Annotated[
        str | Callable | None,
        Option(
            None,
            'source of drafts: "consensus" by default, or a draft model `csd.DraftModel(..)`, or '
            f"a trained head `csd.Eagle(..)`; for comparison also {_listed(names()[1:])}",
            check_drafter,
        ),
    ]
    history: Annotated[
        History | Samples | Sequence[Any] | None,
        Option(
            None,
            "earlier samples of the same prompts, used for drafts only: tokens are the same "
            "without them. A `csd.History`, to which the new samples are added; or a list of past "
            "samples (token ids, texts or Samples), and for a list of prompts one such list per "
            "prompt",
            check_history,
        ),
    ]
    prior: Annotated[
        Prior | str | PathLike[str] | bool | None,
        Option(
            None,
            "n-grams of the model's answers to other prompts, used for drafts only: a `csd.Prior` "
            "or the file of one (`csd prior`). One that learns gets each prompt's answers when the "
            "prompt ends. True: one that learns and ends with the call. None keeps prompts "
            "separate",
            check_prior,
            str,
        ),
    ]
    budget: Annotated[
        str | int,
        Option(
            "auto",
            'number of drafted tokens that a step verifies, over all samples; "auto" chooses the '
            "number with the highest expected token rate",
            check_budget,
            read_budget,
        ),
    ]
