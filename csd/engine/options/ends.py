"""Arguments for ends: where prompts, samples and texts are cut, and when a prompt is done."""

from functools import partial
from typing import Annotated, TypedDict

from csd.engine.options.checks import check_function, or_none
from csd.engine.options.option import Option
from csd.engine.requests import Until, UntilRule
from csd.engine.sampling import check_option
from csd.schema.arguments import check_flag, check_ids, check_one_of, check_strings, check_whole
from csd.state.slots import MAX_STOP_IDS


class EndOptions(TypedDict, total=False):
    """Arguments that decide where samples and prompts end."""

    max_new_tokens: Annotated[
        int | None,
        Option(
            None,
            "512 when left out, cut at the model's context",
            or_none(check_option, "max_new_tokens"),
            int,
        ),
    ]
    min_new_tokens: Annotated[
        int,
        Option(0, "no end token is drawn before", or_none(check_option, "min_new_tokens"), int),
    ]
    stop: Annotated[
        str | list[str] | None,
        Option(
            None,
            "strings that end a sample, found in its text with special tokens",
            or_none(check_strings, "stop"),
            list,
        ),
    ]
    stop_token_ids: Annotated[
        int | list[int] | None,
        Option(
            None,
            "end tokens beside the model's own",
            or_none(check_ids, "stop_token_ids", most=MAX_STOP_IDS),
        ),
    ]
    end_token_ids: Annotated[
        int | list[int] | None,
        Option(
            None,
            "in place of the model's own end tokens, which are those of its generation config "
            "and of its tokenizer",
            or_none(check_ids, "end_token_ids", most=MAX_STOP_IDS),
        ),
    ]
    ignore_eos: Annotated[
        bool,
        Option(
            False,
            "the model's end tokens do not end a sample",
            partial(check_flag, "ignore_eos"),
            bool,
        ),
    ]
    include_stop: Annotated[
        bool,
        Option(
            False,
            "texts end behind the stop string or end token, not before it",
            partial(check_flag, "include_stop"),
            bool,
        ),
    ]
    skip_special_tokens: Annotated[
        bool,
        Option(
            True, "texts leave special tokens out", partial(check_flag, "skip_special_tokens"), bool
        ),
    ]
    truncate_prompt: Annotated[
        int | None,
        Option(
            None,
            "of a longer prompt only so many tokens, the last ones, are read",
            or_none(check_whole, "truncate_prompt", low=1),
            int,
        ),
    ]
    on_error: Annotated[
        str,
        Option(
            "raise",
            'what a prompt that cannot be served does: "raise" ends the call, "return" '
            "gives it a result without samples whose `error` has the reason, while the others are "
            "drawn",
            partial(check_one_of, "on_error", names=("raise", "return")),
            str,
        ),
    ]
    until: Annotated[
        UntilRule | Until | None,
        Option(
            None,
            "`csd.Vote(...)`, or a function of a prompt's samples in the order of their "
            "indices: called with the first, the first two, ... once all of these have finished. "
            "True cancels the rest, so the end is the same for every draft and batch",
            partial(check_function, "until", 1, "csd.Vote() or a function of samples"),
        ),
    ]
