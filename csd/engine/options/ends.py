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
            "maximum number of new tokens per sample; by default 512, limited by the model's "
            "context",
            or_none(check_option, "max_new_tokens"),
            int,
        ),
    ]
    min_new_tokens: Annotated[
        int,
        Option(
            0,
            "minimum number of new tokens: no end token is sampled before",
            or_none(check_option, "min_new_tokens"),
            int,
        ),
    ]
    stop: Annotated[
        str | list[str] | None,
        Option(
            None,
            "strings that end a sample; they are searched in its text including special tokens",
            or_none(check_strings, "stop"),
            list,
        ),
    ]
    stop_token_ids: Annotated[
        int | list[int] | None,
        Option(
            None,
            "end tokens in addition to the model's own",
            or_none(check_ids, "stop_token_ids", most=MAX_STOP_IDS),
        ),
    ]
    end_token_ids: Annotated[
        int | list[int] | None,
        Option(
            None,
            "end tokens that replace the model's own, which come from its generation config and "
            "its tokenizer",
            or_none(check_ids, "end_token_ids", most=MAX_STOP_IDS),
        ),
    ]
    ignore_eos: Annotated[
        bool,
        Option(
            False,
            "do not end a sample at an end token",
            partial(check_flag, "ignore_eos"),
            bool,
        ),
    ]
    include_stop: Annotated[
        bool,
        Option(
            False,
            "keep the stop string or end token at the end of a text",
            partial(check_flag, "include_stop"),
            bool,
        ),
    ]
    skip_special_tokens: Annotated[
        bool,
        Option(
            True,
            "remove special tokens from texts",
            partial(check_flag, "skip_special_tokens"),
            bool,
        ),
    ]
    truncate_prompt: Annotated[
        int | None,
        Option(
            None,
            "keep only N tokens of a longer prompt: its last ones, behind leading special tokens",
            or_none(check_whole, "truncate_prompt", low=1),
            int,
        ),
    ]
    on_error: Annotated[
        str,
        Option(
            "raise",
            'what to do with a prompt that cannot be served: "raise" ends the call with an error; '
            '"return" returns a result without samples, whose `error` has the reason, and draws '
            "the other prompts. A sample that cannot continue has an `error`, which "
            '"raise" raises once all samples have ended',
            partial(check_one_of, "on_error", names=("raise", "return")),
            str,
        ),
    ]
    until: Annotated[
        UntilRule | Until | None,
        Option(
            None,
            "when to stop drawing samples of a prompt: `csd.Vote(...)`, or a function of a list "
            "of the prompt's samples. It is called with the first sample, the first two, and so "
            "on, by index, once all of these have finished. True cancels the rest, so the result "
            "does not depend on drafts or batch",
            partial(check_function, "until", 1, "csd.Vote() or a function of samples"),
        ),
    ]
