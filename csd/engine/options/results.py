"""Arguments for the form of prompts, and for the reports and records of a call."""

from functools import partial
from typing import Annotated, Any, TypedDict

import torch

from csd.engine.options.checks import (
    check_function,
    check_record,
    check_template,
    check_tokenizer,
    check_type,
    or_none,
)
from csd.engine.options.option import Option
from csd.engine.requests import OnText
from csd.engine.top_logprobs import MOST_TOP
from csd.schema.arguments import check_flag, check_whole


class ResultOptions(TypedDict, total=False):
    """Arguments that change no token: the form of prompts, and the records of samples."""

    tokenizer: Annotated[
        Any, Option(None, "tokenizer to use instead of the model's own", check_tokenizer)
    ]
    attention_mask: Annotated[
        torch.Tensor | None,
        Option(
            None,
            "mask for a 2-D tensor of prompts: 0 marks padding",
            partial(check_type, "attention_mask", (torch.Tensor,), "a 2-D tensor"),
        ),
    ]
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Option(
            None,
            "arguments of the chat template in addition to the messages: enable_thinking, tools, "
            "continue_final_message",
            check_template,
        ),
    ]
    progress: Annotated[
        bool | None,
        Option(
            None,
            "show one line per phase of a first call and a progress bar in tokens; None shows "
            "them on a terminal only",
            or_none(check_flag, "progress"),
        ),
    ]
    callback: Annotated[
        OnText | None,
        Option(
            None,
            "function called as callback(prompt index, sample index, new tokens, their text), "
            "once per step for each sample with new tokens",
            partial(check_function, "callback", 4, "a function"),
        ),
    ]
    record: Annotated[str | None, Option(None, "path of a trace file to write", check_record, str)]
    top_logprobs: Annotated[
        int,
        Option(
            0,
            "number of most likely tokens to keep at each position, up to 20, with their raw "
            "log-probabilities, in `out[i].top_logprobs`",
            partial(check_whole, "top_logprobs", low=0, high=MOST_TOP),
            int,
        ),
    ]
    entropy: Annotated[
        bool,
        Option(
            False,
            "keep the entropy of the model's distribution at each position in `out[i].entropies`",
            partial(check_flag, "entropy"),
            bool,
        ),
    ]
    prompt_logprobs: Annotated[
        bool,
        Option(
            False,
            "keep the raw log-probabilities of the prompt's tokens in `out.prompt_logprobs`",
            partial(check_flag, "prompt_logprobs"),
            bool,
        ),
    ]
    drafts: Annotated[
        bool,
        Option(
            False,
            "keep the drafts of each step in `out[i].drafts`",
            partial(check_flag, "drafts"),
            bool,
        ),
    ]
