"""Arguments for drafts: none of them changes a token with the verifier `match`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, TypedDict

from csd.engine.history_args import check_history
from csd.engine.options.checks import check_drafter
from csd.engine.options.option import Option
from csd.engine.result import Samples
from csd.engine.traces.history import History
from csd.graph.registry import names
from csd.schema.arguments import check_budget, check_flag, check_one_of, check_share
from csd.verify.multi_draft import DRAWS

VERIFIERS = ("match", *DRAWS)


def read_budget(text: str) -> str | int:
    """Parse a budget of the command line."""
    return text if text == "auto" else int(text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


class DraftingOptions(TypedDict, total=False):
    """Arguments that decide what is drafted and how it is verified."""

    speculate: Annotated[
        bool, Option(True, "False draws without drafts", partial(check_flag, "speculate"), bool)
    ]
    verifier: Annotated[
        str,
        Option(
            "match",
            "`canonical`, `recursive`, `kseq` and `single` draw their drafts from the graph, "
            "or from a draft model, and accept or resample them (`csd.verify`). The samples' "
            "distribution is the same, but tokens depend on siblings, batch and budget, and a seed "
            "repeats them only for the same call with an integer `budget`",
            partial(check_one_of, "verifier", names=VERIFIERS),
        ),
    ]
    drafter: Annotated[
        str | Callable | None,
        Option(
            None,
            'by default "consensus"; `csd.DraftModel(..)` or `csd.Eagle(..)` draft with a '
            f"model or a trained head; for comparison also {_listed(names()[1:])}",
            check_drafter,
        ),
    ]
    history: Annotated[
        History | Samples | Sequence[Any] | None,
        Option(
            None,
            "what was sampled earlier of the same prompts; it only drafts, so tokens are the "
            "same without. A `csd.History` is read before and added to after; else a list of past "
            "samples (token ids, texts or Samples), and for a list of prompts a list of these",
            check_history,
        ),
    ]
    share: Annotated[
        str | None,
        Option(
            None,
            '"call": samples also draft, with low weight, from samples of the call\'s other '
            "prompts that finished before theirs was admitted; tokens are the same without. None "
            "keeps the prompts of a call apart",
            check_share,
            str,
        ),
    ]
    budget: Annotated[
        str | int,
        Option(
            "auto",
            'drafted tokens that a step verifies over all samples; "auto" takes what pays',
            check_budget,
            read_budget,
        ),
    ]
