"""Arguments of `csd.generate` by group, each with its default, check, flag and description.

SamplingOptions  the samples' distribution: which samples, filters, penalties, bans, grammars
EndOptions       where prompts, samples and texts are cut, and when a prompt is done
DraftingOptions  drafts: none of them changes a token with the verifier `match`
ResultOptions    the form of prompts, and the reports and records of a call
LoadingOptions   a model that a call loads by name
"""

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Annotated, Any, TypedDict

import torch

from csd.engine.options.checks import (
    check_device,
    check_drafter,
    check_dtype,
    check_function,
    check_history,
    check_prior,
    check_record,
    check_revision,
    check_seed_or_none,
    check_template,
    check_tokenizer,
    check_type,
    or_none,
)
from csd.engine.options.params import check_option
from csd.engine.results.logprobs import MOST_TOP
from csd.engine.results.result import Samples
from csd.engine.results.until import OnText, Until, UntilRule
from csd.graph.drafter_registry import names
from csd.graph.prior import Prior
from csd.models.load.choose_decoder import check_decoder
from csd.state.slots import MAX_STOP_IDS
from csd.traces.history import History
from csd.utils.arguments import (
    LARGEST,
    check_budget,
    check_flag,
    check_ids,
    check_one_of,
    check_strings,
    check_whole,
)
from csd.verify.multi_draft import DRAWS


@dataclass(frozen=True, slots=True)
class Option:
    """One argument. Its flags are "--" plus its name with hyphens, and `short`."""

    default: Any
    help: str
    # maps a value to the one to use, or to None if it is used unchanged; raises TypeError or
    # ValueError naming the argument
    check: Callable[[Any], Any] | None = None
    # parser on the command line: a function of the text, bool, or list for a repeatable flag
    flag: Callable[[str], Any] | None = None
    short: str | None = None


# most samples of a prompt per call: each is an object in memory
MOST_SAMPLES = 1 << 20


class SamplingOptions(TypedDict, total=False):
    """Arguments that decide which token is drawn at a position."""

    num_samples: Annotated[
        int,
        Option(
            1,
            "number of samples per prompt",
            partial(check_whole, "num_samples", low=1, high=MOST_SAMPLES),
            int,
            "-n",
        ),
    ]
    first_sample: Annotated[
        int,
        Option(
            0,
            "index of the first sample: two calls of 8 samples, with 0 and then 8, draw the same "
            "as one call of 16",
            partial(check_whole, "first_sample", low=0, high=LARGEST),
            int,
        ),
    ]
    seed: Annotated[
        int | None,
        Option(
            None,
            "random seed; the same seed draws the same samples. By default drawn from torch's "
            "generator and returned as `out.seed`",
            check_seed_or_none,
            int,
        ),
    ]
    temperature: Annotated[
        float | None,
        Option(
            None,
            "sampling temperature; 0 is greedy. By default the value of the model's generation "
            "config, else 1. Temperature, top-k, top-p, min-p and repetition penalty are defined "
            "as in transformers",
            or_none(check_option, "temperature"),
            float,
        ),
    ]
    top_k: Annotated[
        int | None,
        Option(
            None,
            "keep the k most likely tokens, and all tokens tied with the last of them; 0 is off. "
            "By default the value of the generation config, else off",
            or_none(check_option, "top_k"),
            int,
        ),
    ]
    top_p: Annotated[
        float | None,
        Option(
            None,
            "nucleus sampling: keep the most likely tokens whose probabilities sum to this value; "
            "1 is off. By default the value of the generation config, else off",
            or_none(check_option, "top_p"),
            float,
        ),
    ]
    min_p: Annotated[
        float | None,
        Option(
            None,
            "minimum probability of a token, relative to the most likely one; 0 is off",
            or_none(check_option, "min_p"),
            float,
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        Option(
            None,
            "penalty on tokens that the prompt or the sample already contains; 1 is off",
            or_none(check_option, "repetition_penalty"),
            float,
        ),
    ]
    logit_bias: Annotated[
        dict[int, float] | None,
        Option(
            None,
            "{token id: value} to add to the model's logits; -inf bans a token. This option and "
            "the following ones, up to `grammar`, change a sample's logits depending only on its "
            "own prefix, before the filters; drafts do not change what is sampled",
            or_none(check_option, "logit_bias"),
        ),
    ]
    bad_words: Annotated[
        str | list[str] | list[list[int]] | None,
        Option(
            None,
            "strings or lists of token ids that must not be sampled. In a list of several tokens, "
            "the last one is banned after the others. A string is banned with and without a space "
            "before it",
            or_none(check_option, "bad_words"),
            list,
        ),
    ]
    allowed_token_ids: Annotated[
        list[int] | None,
        Option(
            None,
            "token ids that may be sampled; all others are banned, end tokens included",
            or_none(check_option, "allowed_token_ids"),
        ),
    ]
    suppress_tokens: Annotated[
        list[int] | None,
        Option(
            None, "token ids that must not be sampled", or_none(check_option, "suppress_tokens")
        ),
    ]
    no_repeat_ngram_size: Annotated[
        int | None,
        Option(
            None,
            "size of n-grams that must not occur twice in prompt and sample; 0 is off",
            or_none(check_option, "no_repeat_ngram_size"),
            int,
        ),
    ]
    frequency_penalty: Annotated[
        float | None,
        Option(
            None,
            "value subtracted from a token's logit for each time the sample already contains it; "
            "0 is off",
            or_none(check_option, "frequency_penalty"),
            float,
        ),
    ]
    presence_penalty: Annotated[
        float | None,
        Option(
            None,
            "value subtracted from the logits of tokens that the sample already contains; 0 is off",
            or_none(check_option, "presence_penalty"),
            float,
        ),
    ]
    logits_processor: Annotated[
        Callable | Sequence[Callable] | None,
        Option(
            None,
            "a LogitsProcessor of transformers, a function of token ids [rows, length] and logits "
            "[rows, vocabulary] that returns new logits, or a list of these. Rows are possible "
            "prefixes of samples, in any order: the result for a row may depend only on that row",
            or_none(check_option, "logits_processor"),
        ),
    ]
    max_thinking_tokens: Annotated[
        int | None,
        Option(
            None,
            "maximum number of tokens of a thought; then the tokens that end the thought are "
            "forced, and `out[i].forced` marks them",
            or_none(check_option, "max_thinking_tokens"),
            int,
        ),
    ]
    thinking_tags: Annotated[
        Sequence[str | Sequence[int]] | None,
        Option(
            None,
            "begin and end of a thought, as strings or lists of token ids; by default those of "
            "the chat template. A third entry is the text written to end a thought, which must "
            "itself end with the end",
            or_none(check_option, "thinking_tags"),
        ),
    ]
    json_schema: Annotated[
        dict | str | type | None,
        Option(
            None,
            "JSON schema of the texts: a dict, a JSON string or a pydantic class. End tokens are "
            "allowed only where the text is complete. This option, `regex` and `grammar` need "
            "llguidance (`pip install 'csd-llm[grammar]'`)",
            or_none(check_option, "json_schema"),
        ),
    ]
    regex: Annotated[
        str | None,
        Option(
            None, "regular expression that the texts match", or_none(check_option, "regex"), str
        ),
    ]
    grammar: Annotated[
        str | None,
        Option(
            None,
            "grammar of the texts, in Lark syntax",
            or_none(check_option, "grammar"),
            str,
        ),
    ]


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
            or_none(check_ids, "stop_token_ids", max_count=MAX_STOP_IDS),
        ),
    ]
    end_token_ids: Annotated[
        int | list[int] | None,
        Option(
            None,
            "end tokens that replace the model's own, which come from its generation config and "
            "its tokenizer",
            or_none(check_ids, "end_token_ids", max_count=MAX_STOP_IDS),
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


class LoadingOptions(TypedDict, total=False):
    """Arguments of `csd.generate` and `csd.stream` for a model that they load."""

    device: Annotated[
        str | torch.device | None,
        Option(
            None,
            "device of a model given by name; by default a GPU if there is one",
            check_device,
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
    revision: Annotated[
        str | None, Option(None, "branch, tag or commit of a model on the hub", check_revision, str)
    ]
    decoder: Annotated[
        str,
        Option(
            "auto",
            'decoder that runs the model: "fused" is csd\'s own, "module" the model\'s own '
            'module; "auto", the default, takes the fused one if it supports the family and the '
            "module is unmodified",
            check_decoder,
            str,
        ),
    ]
