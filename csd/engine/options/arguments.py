"""Arguments of `csd.generate` by group, each with its default, check, flag and description."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike
from typing import Annotated, Any, TypedDict

import torch

from csd.engine.options.checks import (
    boolean,
    check_drafter,
    check_dtype,
    check_function,
    check_history,
    check_prior,
    check_record,
    check_template,
    check_tokenizer,
    check_type,
    whole,
)
from csd.engine.results.logprobs import MOST_TOP
from csd.engine.results.result import OnText, Samples, Until, UntilRule
from csd.graph.prior import Prior
from csd.graph.registry import names, verifier_names
from csd.models.load.choose_decoder import DECODERS
from csd.models.load.quantize import TYPES
from csd.state.slots import MAX_STOP_IDS
from csd.traces.history import History
from csd.utils.arguments import (
    LARGEST,
    Option,
    check_budget,
    check_ids,
    check_one_of,
    check_seed,
    check_strings,
)

# most samples of a prompt per call: each is an object in memory
MOST_SAMPLES = 1 << 20


class SampleOptions(TypedDict, total=False):
    """Arguments that choose the samples to draw."""

    num_samples: Annotated[
        int,
        whole(1, "number of samples per prompt", low=1, high=MOST_SAMPLES, short="-n", fields="n"),
    ]
    first_sample: Annotated[
        int,
        whole(
            0,
            "index of the first sample: two calls of 8 samples, with 0 and then 8, draw the same "
            "as one call of 16",
            high=LARGEST,
            fields="first_sample",
        ),
    ]
    seed: Annotated[
        int | None,
        Option(
            None,
            "random seed; the same seed draws the same samples. By default drawn from torch's "
            "generator and returned as `out.seed`",
            check_seed,
            int,
            flag_help="random seed; the same seed draws the same samples",
            fields="seed",
        ),
    ]


class EndOptions(TypedDict, total=False):
    """Arguments that decide where samples and their texts end."""

    max_new_tokens: Annotated[
        int | None,
        whole(
            None,
            "maximum number of new tokens per sample; by default 512, limited by the model's "
            "context",
            low=1,
            high=LARGEST,
            off=512,
            fields="max_tokens max_completion_tokens",
        ),
    ]
    min_new_tokens: Annotated[
        int | None,
        whole(
            None,
            "minimum number of new tokens: no end token is sampled before",
            high=LARGEST,
            off=0,
            processor="MinNewTokensLengthLogitsProcessor.min_new_tokens",
            fields="min_tokens",
        ),
    ]
    stop: Annotated[
        str | list[str] | None,
        Option(
            None,
            "strings that end a sample; they are searched in its text including special tokens",
            check_strings,
            list,
            flag_help="a string that ends a sample; it is searched in the text including special "
            "tokens",
            off=(),
            config="stop_strings",
            fields="stop",
        ),
    ]
    stop_token_ids: Annotated[
        int | list[int] | None,
        Option(
            None,
            "tokens that end a sample, in addition to the model's own end tokens",
            partial(check_ids, max_count=MAX_STOP_IDS),
            off=(),
            fields="stop_token_ids",
        ),
    ]
    end_token_ids: Annotated[
        int | list[int] | None,
        Option(
            None,
            "end tokens that replace the model's own, which come from its generation config and "
            "its tokenizer",
            partial(check_ids, max_count=MAX_STOP_IDS),
        ),
    ]
    ignore_eos: Annotated[
        bool,
        boolean(
            False,
            "do not end a sample at the model's end tokens, or at those of `end_token_ids`; "
            "`stop_token_ids` still end it",
            flag_help="do not end a sample at the model's end tokens",
            fields="ignore_eos",
        ),
    ]
    include_stop: Annotated[
        bool,
        boolean(
            False,
            "keep the stop string or end token at the end of a text",
            fields="include_stop_str_in_output",
        ),
    ]
    skip_special_tokens: Annotated[
        bool, boolean(True, "remove special tokens from texts", fields="skip_special_tokens")
    ]


class PromptOptions(TypedDict, total=False):
    """Arguments that decide how prompts are cut, and when one has ended."""

    truncate_prompt: Annotated[
        int | None,
        whole(
            None,
            "keep only N tokens of a longer prompt: its last ones, behind leading special tokens",
            low=1,
            fields="truncate_prompt_tokens",
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
            partial(check_one_of, names=("raise", "return")),
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
            partial(check_function, arguments=1, expected="csd.Vote() or a function of samples"),
        ),
    ]


def read_budget(text: str) -> str | int:
    """Parse a budget of the command line."""
    if text != "auto" and not text.isdecimal():
        raise ArgumentTypeError(f"must be 'auto' or a whole number, got {text!r}")
    return text if text == "auto" else int(text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


# arguments of a call and of an engine
Tokenizer = Annotated[
    Any, Option(None, "tokenizer to use instead of the model's own", check_tokenizer)
]
# arguments of a call, and of an `AsyncEngine` for all its requests
Speculate = Annotated[bool, boolean(True, "use speculative decoding")]
Drafter = Annotated[
    str | Callable | None,
    Option(
        None,
        'source of drafts: "consensus" by default, or a draft model `csd.DraftModel(..)`, or '
        f"a trained head `csd.Eagle(..)`; for comparison also {_listed(names()[1:])}",
        check_drafter,
    ),
]
Priors = Annotated[
    Prior | str | PathLike[str] | bool | None,
    Option(
        None,
        "n-grams of the model's answers to other prompts, used for drafts only: a `csd.Prior` "
        "or the file of one (`csd prior`). One that learns gets each prompt's answers when the "
        "prompt ends. True: one that learns and ends with the call. None keeps prompts "
        "separate",
        check_prior,
        str,
        flag_help="file of n-grams of the model's answers to other prompts (`csd prior`), used for "
        "drafts only",
    ),
]
Budget = Annotated[
    str | int,
    Option(
        "auto",
        'number of drafted tokens that a step verifies, over all samples; "auto" chooses the '
        "number with the highest expected token rate",
        check_budget,
        read_budget,
    ),
]


class DraftingOptions(TypedDict, total=False):
    """Arguments that decide what is drafted and how it is verified."""

    speculate: Speculate
    verifier: Annotated[
        str,
        Option(
            "match",
            "how drafts are verified. The default accepts a draft only where it equals the "
            "model's own sample. `canonical`, `recursive`, `kseq` and `single` draw drafts from "
            "the graph or from a draft model, and accept or resample them "
            "(`csd.research.verify`). They keep the samples' distribution, but tokens depend on "
            "siblings, batch and budget, and a seed repeats them only for the same call with an "
            "integer `budget`",
            partial(check_one_of, names=verifier_names()),
        ),
    ]
    drafter: Drafter
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
    prior: Priors
    budget: Budget


class ResultOptions(TypedDict, total=False):
    """Arguments that change no token: the form of prompts, and the records of samples."""

    tokenizer: Tokenizer
    attention_mask: Annotated[
        torch.Tensor | None,
        Option(
            None,
            "mask for a 2-D tensor of prompts: 0 marks padding",
            partial(check_type, kinds=(torch.Tensor,), expected="a 2-D tensor"),
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
        boolean(
            None,
            "show one line per phase of a first call and a progress bar in tokens; None shows "
            "them on a terminal, in IPython and in notebooks",
            flag=None,
        ),
    ]
    callback: Annotated[
        OnText | None,
        Option(
            None,
            "function called as callback(prompt index, sample index, new tokens, their text), "
            "once per step for each sample with new tokens",
            partial(check_function, arguments=4, expected="a function"),
        ),
    ]
    record: Annotated[str | None, Option(None, "path of a trace file to write", check_record, str)]
    top_logprobs: Annotated[
        int,
        whole(
            0,
            "number of most likely tokens to keep at each position, up to 20, with their raw "
            "log-probabilities, in `out[i].top_logprobs`",
            high=MOST_TOP,
            flag_help="number of most likely tokens at each position, up to 20, with their raw "
            "log-probabilities, in the output of --json",
        ),
    ]
    entropy: Annotated[
        bool,
        boolean(
            False,
            "keep the entropy of the model's distribution at each position in `out[i].entropies`",
            flag_help="entropy of the model's distribution at each position, in the output of "
            "--json",
        ),
    ]
    prompt_logprobs: Annotated[
        bool,
        boolean(
            False,
            "keep the raw log-probabilities of the prompt's tokens in `out.prompt_logprobs`",
            flag_help="raw log-probabilities of the prompt's tokens, in the output of --json",
        ),
    ]
    drafts: Annotated[
        bool,
        boolean(
            False,
            "keep the drafts of each step in `out[i].drafts`",
            flag_help="drafts of each step, in the output of --json",
        ),
    ]


class LoadingOptions(TypedDict, total=False):
    """Arguments of `csd.generate` and `csd.stream` for a model that they load."""

    device: Annotated[
        str | torch.device | None,
        Option(
            None,
            "device of a model given by name; by default a GPU if there is one",
            partial(check_type, kinds=(str, torch.device), expected="a name or a torch.device"),
            str,
        ),
    ]
    dtype: Annotated[
        str | torch.dtype | None,
        Option(
            None,
            "dtype of a model given by name; by default the checkpoint's on a GPU and on a CPU "
            "that multiplies bfloat16, else float32",
            check_dtype,
            str,
        ),
    ]
    quantization: Annotated[
        str | None,
        Option(
            None,
            "type of GGUF files to which the matrices of a model given by name are rounded, "
            f"{', '.join(TYPES)}: a step on a CPU then reads a quarter to a half of bfloat16's "
            "bytes. By default none; a GGUF file keeps its own types",
            partial(check_one_of, names=TYPES),
            str,
        ),
    ]
    revision: Annotated[
        str | None,
        Option(
            None,
            "branch, tag or commit of a model on the hub",
            partial(check_type, kinds=(str,), expected="a name"),
            str,
        ),
    ]
    decoder: Annotated[
        str,
        Option(
            "auto",
            'decoder that runs the model: "fused" is csd\'s own, "module" the model\'s own '
            'module; "auto", the default, takes the fused one if it supports the family and the '
            "module is unmodified",
            partial(check_one_of, names=DECODERS),
            str,
        ),
    ]
