"""The arguments of `csd.generate`, each defined once.

`Options` is the static type of the keyword arguments, and the `Option` beside each type holds its
default, its check, its command-line flag and its description. From these come the signatures that
editors show (`shows`), the checks of a call (`read_options`), the flags of the `csd` command
(`add_flags`) and the list in `help(csd.generate)`.
"""

import inspect
import os
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

import torch

from csd.engine.history_args import check_history
from csd.engine.measures import MOST_TOP
from csd.engine.requests import OnText, Until, UntilRule
from csd.engine.result import Samples
from csd.engine.sampling import check_option
from csd.engine.traces.history import History
from csd.graph.registry import check_known, names
from csd.models.choose_decoder import check_decoder
from csd.schema.arguments import (
    LARGEST,
    check_budget,
    check_flag,
    check_ids,
    check_one_of,
    check_path,
    check_seed,
    check_share,
    check_strings,
    check_whole,
    takes,
)
from csd.schema.check import shown
from csd.schema.other_names import unknown_argument
from csd.state.slots import MAX_STOP_IDS
from csd.verify.multi_draft import DRAWS

VERIFIERS = ("match", *DRAWS)


@dataclass(frozen=True, slots=True)
class Option:
    """One argument. The names of its flag are "--" and its own with hyphens, and `short`."""

    default: Any
    help: str
    # gets the value and returns the one to use, None for as it is; raises TypeError or ValueError
    # naming the argument
    check: Callable[[Any], Any] | None = None
    # how the command line reads it: a function of the text, bool, or list for a repeatable flag
    flag: Callable[[str], Any] | None = None
    short: str | None = None


def read_budget(text: str) -> str | int:
    """A budget as the command line has it."""
    return text if text == "auto" else int(text)


# samples of a prompt that a call draws at most: each is an object in memory
MOST_SAMPLES = 1 << 20


def _or_none(check: Callable[..., Any], name: str, **limits: Any) -> Callable[[Any], Any]:
    """`check` of a value that may also be None."""
    return lambda value: None if value is None else check(name, value, **limits)


def _check_type(name: str, kinds: tuple[type, ...], expected: str, value: Any) -> None:
    if value is not None and not isinstance(value, kinds):
        raise TypeError(f"{name} must be {expected}, got a {type(value).__name__}")


def check_drafter(value: Any) -> None:
    """Raises TypeError or ValueError, naming `drafter`, for what drafts for no call."""
    if value is not None:
        check_known(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _check_function(name: str, arguments: int, expected: str, value: Any) -> None:
    # a class, as in until=csd.Vote, is callable, but it is not a function of samples
    served = takes(value, arguments) or (name == "until" and isinstance(value, UntilRule))
    if value is not None and (not served or isinstance(value, type)):
        raise TypeError(f"{name} must be {expected}, got {shown(value)}")


def check_tokenizer(value: Any) -> None:
    """Raises TypeError, naming `tokenizer`, for what is none."""
    reads = callable(value) and hasattr(value, "decode") and not isinstance(value, type)
    if value is not None and not reads:
        raise TypeError(f"tokenizer must be one of transformers', got {shown(value)}")


def _check_template(value: Any) -> None:
    _check_type("chat_template_kwargs", (dict,), "a dict", value)
    if not all(isinstance(key, str) for key in value or ()):
        raise TypeError(f"chat_template_kwargs must have strings for keys, got {shown(value)}")


check_device = partial(_check_type, "device", (str, torch.device), "a name or a torch.device")
check_dtype = partial(_check_type, "dtype", (torch.dtype,), "a torch.dtype")
check_revision = partial(_check_type, "revision", (str,), "a name")


def _check_record(value: Any) -> None:
    if value is None:
        return
    check_path("record", value)
    folder = os.path.dirname(os.path.abspath(value))
    # not after all has been drawn
    if os.path.isdir(value) or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"record must be a file in a folder that can be written to, got {value!r}")


def _check_seed(value: Any) -> int | None:
    return None if value is None else check_seed(value)


class Options(TypedDict, total=False):
    """The keyword arguments of `Engine.generate` and `Engine.stream`."""

    num_samples: Annotated[
        int,
        Option(
            1,
            "samples of each prompt",
            partial(check_whole, "num_samples", low=1, high=MOST_SAMPLES),
            int,
            "-n",
        ),
    ]
    first_sample: Annotated[
        int,
        Option(
            0,
            "index of the first sample: 0 and then 8 draws 16 in two calls of 8",
            partial(check_whole, "first_sample", low=0, high=LARGEST),
            int,
        ),
    ]
    seed: Annotated[
        int | None,
        Option(
            None,
            "None draws one from torch's default generator; `out.seed` has it",
            _check_seed,
            int,
        ),
    ]
    temperature: Annotated[
        float | None,
        Option(
            None,
            "0 is greedy. This and the next four are as transformers defines them; left out, "
            "the model's generation config decides, else they are off",
            _or_none(check_option, "temperature"),
            float,
        ),
    ]
    top_k: Annotated[
        int | None,
        Option(
            None,
            "0 is off; tokens tied at the cut are all kept",
            _or_none(check_option, "top_k"),
            int,
        ),
    ]
    top_p: Annotated[
        float | None,
        Option(None, "nucleus sampling; 1 is off", _or_none(check_option, "top_p"), float),
    ]
    min_p: Annotated[
        float | None,
        Option(
            None,
            "least probability, as a share of the largest; 0 is off",
            _or_none(check_option, "min_p"),
            float,
        ),
    ]
    repetition_penalty: Annotated[
        float | None, Option(None, "1 is off", _or_none(check_option, "repetition_penalty"), float)
    ]
    logit_bias: Annotated[
        dict[int, float] | None,
        Option(
            None,
            "{token id: value} added to the model's logits; -inf bans. This and the next twelve "
            "change a sample's logits as its own prefix asks, before any filter; drafts do not "
            "change what is sampled",
            _or_none(check_option, "logit_bias"),
        ),
    ]
    bad_words: Annotated[
        str | list[str] | list[list[int]] | None,
        Option(
            None,
            "strings or lists of token ids that are not sampled: the last token of a longer one "
            "is banned where the others come before it. A string is banned as its tokens with and "
            "without a space before",
            _or_none(check_option, "bad_words"),
            list,
        ),
    ]
    allowed_token_ids: Annotated[
        list[int] | None,
        Option(
            None,
            "all other tokens are banned, end tokens too",
            _or_none(check_option, "allowed_token_ids"),
        ),
    ]
    suppress_tokens: Annotated[
        list[int] | None,
        Option(None, "token ids that are banned", _or_none(check_option, "suppress_tokens")),
    ]
    no_repeat_ngram_size: Annotated[
        int | None,
        Option(
            None,
            "n-grams of prompt and sample that do not come again; 0 is off",
            _or_none(check_option, "no_repeat_ngram_size"),
            int,
        ),
    ]
    frequency_penalty: Annotated[
        float | None,
        Option(
            None,
            "taken off a token's logit for each time the sample has it already; 0 is off",
            _or_none(check_option, "frequency_penalty"),
            float,
        ),
    ]
    presence_penalty: Annotated[
        float | None,
        Option(
            None,
            "taken off the logits of tokens that the sample has already; 0 is off",
            _or_none(check_option, "presence_penalty"),
            float,
        ),
    ]
    logits_processor: Annotated[
        Callable | Sequence[Callable] | None,
        Option(
            None,
            "transformers' LogitsProcessor, or functions of token ids [rows, length] and logits "
            "[rows, vocabulary] that return the logits to use. Rows are prefixes that samples can "
            "have, in any order: a function may depend on nothing else",
            _or_none(check_option, "logits_processor"),
        ),
    ]
    max_thinking_tokens: Annotated[
        int | None,
        Option(
            None,
            "tokens of thought, after which the end of the thought is all that can follow; "
            "`out[i].forced` marks its tokens",
            _or_none(check_option, "max_thinking_tokens"),
            int,
        ),
    ]
    thinking_tags: Annotated[
        Sequence[str | Sequence[int]] | None,
        Option(
            None,
            "what begins and ends a thought, by default as the chat template has it; a third is "
            "what is written to end it, itself with the end at its end",
            _or_none(check_option, "thinking_tags"),
        ),
    ]
    json_schema: Annotated[
        dict | str | type | None,
        Option(
            None,
            "texts are JSON of this schema: a dict, its text or a class of pydantic; needs "
            "llguidance (`pip install csd[grammar]`), as the next two do. End tokens come only "
            "where the text is whole",
            _or_none(check_option, "json_schema"),
        ),
    ]
    regex: Annotated[
        str | None,
        Option(None, "texts match this regular expression", _or_none(check_option, "regex"), str),
    ]
    grammar: Annotated[
        str | None,
        Option(
            None,
            "texts are of this grammar, in the syntax of Lark",
            _or_none(check_option, "grammar"),
            str,
        ),
    ]
    max_new_tokens: Annotated[
        int | None,
        Option(
            None,
            "512 when left out, cut at the model's context",
            _or_none(check_option, "max_new_tokens"),
            int,
        ),
    ]
    min_new_tokens: Annotated[
        int,
        Option(0, "no end token is drawn before", _or_none(check_option, "min_new_tokens"), int),
    ]
    stop: Annotated[
        str | list[str] | None,
        Option(
            None,
            "strings that end a sample, found in its text with special tokens",
            _or_none(check_strings, "stop"),
            list,
        ),
    ]
    stop_token_ids: Annotated[
        int | list[int] | None,
        Option(
            None,
            "end tokens beside the model's own",
            _or_none(check_ids, "stop_token_ids", most=MAX_STOP_IDS),
        ),
    ]
    end_token_ids: Annotated[
        int | list[int] | None,
        Option(
            None,
            "in place of the model's own end tokens, which are those of its generation config "
            "and of its tokenizer",
            _or_none(check_ids, "end_token_ids", most=MAX_STOP_IDS),
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
            _or_none(check_whole, "truncate_prompt", low=1),
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
            partial(_check_function, "until", 1, "csd.Vote() or a function of samples"),
        ),
    ]
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
    tokenizer: Annotated[Any, Option(None, "in place of the model's own", check_tokenizer)]
    attention_mask: Annotated[
        torch.Tensor | None,
        Option(
            None,
            "for a 2-D tensor of prompts: 0 where it is padding",
            partial(_check_type, "attention_mask", (torch.Tensor,), "a 2-D tensor"),
        ),
    ]
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Option(
            None,
            "what the chat template reads beside messages: enable_thinking, tools, "
            "continue_final_message",
            _check_template,
        ),
    ]
    progress: Annotated[bool, Option(False, "show a progress bar", partial(check_flag, "progress"))]
    callback: Annotated[
        OnText | None,
        Option(
            None,
            "called as callback(prompt index, sample index, new tokens, their text) once a step "
            "for each sample with new tokens",
            partial(_check_function, "callback", 4, "a function"),
        ),
    ]
    record: Annotated[str | None, Option(None, "path of a trace file to write", _check_record, str)]
    top_logprobs: Annotated[
        int,
        Option(
            0,
            "likeliest tokens of each place, up to 20, kept with their raw log-probabilities in "
            "`out[i].top_logprobs`",
            partial(check_whole, "top_logprobs", low=0, high=MOST_TOP),
            int,
        ),
    ]
    entropy: Annotated[
        bool,
        Option(
            False,
            "keep the entropy of the model at each place in `out[i].entropies`",
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
            "keep what each step drafted in `out[i].drafts`",
            partial(check_flag, "drafts"),
            bool,
        ),
    ]


class GenerateOptions(Options, total=False):
    """The keyword arguments of `csd.generate` and `csd.stream`, which also load the model."""

    device: Annotated[
        str | torch.device | None,
        Option(
            None, "for a model given by name; by default a GPU if there is one", check_device, str
        ),
    ]
    dtype: Annotated[
        torch.dtype | None,
        Option(
            None,
            "for a model given by name; by default its checkpoint's on a GPU and on a CPU that "
            "multiplies bfloat16, else float32",
            check_dtype,
        ),
    ]
    revision: Annotated[str | None, Option(None, "of a model on the hub", check_revision, str)]
    decoder: Annotated[
        str,
        Option(
            "auto",
            'which decoder runs the model: csd\'s "fused" one, the "module" itself, or by '
            "default the fused one where it has the family and the module is plain",
            check_decoder,
            str,
        ),
    ]


def options_of(kind: type) -> dict[str, tuple[Any, Option]]:
    """Type and `Option` of each argument in `kind`, in the order of their definition."""
    hints = get_type_hints(kind, include_extras=True)
    order = dict.fromkeys(name for base in (Options, kind) for name in base.__annotations__)
    return {name: get_args(hints[name])[:2] for name in order}


def read_options(given: Mapping[str, Any], kind: type = Options) -> dict[str, Any]:
    """All arguments in `kind`, those not given at their defaults, each checked.

    Raises TypeError for an unknown one.
    """
    known_options = options_of(kind)
    for name in given:
        if name not in known_options:
            raise unknown_argument(name, known_options)
    found = {}
    for name, (_, option) in known_options.items():
        found[name] = given.get(name, option.default)
        if option.check is not None and (checked := option.check(found[name])) is not None:
            found[name] = checked
    return found


F = TypeVar("F", bound=Callable)


def shows(kind: type) -> Callable[[F], F]:
    """A decorator: the function's signature lists the arguments in `kind`, its docstring too."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        listed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        lines = []
        for name, (hint, option) in options_of(kind).items():
            listed.append(inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hint
            ))  # fmt: skip
            text = f"{name}: {option.default!r}. {option.help}."
            lines += textwrap.wrap(text, 92, subsequent_indent="    ")
        function.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
        arguments = "Keyword arguments, with their defaults:\n\n" + "\n".join(lines)
        doc = inspect.getdoc(function) or ""
        function.__doc__ = doc.replace("{options}", arguments)
        return function

    return decorate


def check_flags(args: Namespace, names: Iterable[str]) -> None:
    """Before a model is loaded: raises TypeError or ValueError, naming one of `names`."""
    read_options({name: getattr(args, name) for name in names}, GenerateOptions)


def add_flags(parser: ArgumentParser, names: Iterable[str], **defaults: Any) -> None:
    """A flag for each of `names`; `defaults` replace those of `Options`."""
    known_options = options_of(GenerateOptions)
    for name in names:
        option = known_options[name][1]
        default = defaults.get(name, option.default)
        flag = "--" + name.replace("_", "-")
        if option.flag is bool:
            if default:
                negated = f"sets {name} to False ({option.help})"
                parser.add_argument(
                    "--no-" + flag[2:], dest=name, action="store_false", help=negated
                )
            else:
                parser.add_argument(flag, action="store_true", help=option.help)
        elif option.flag is list:
            parser.add_argument(flag, action="append", help=option.help + "; repeatable")
        else:
            if option.flag is None:
                raise ValueError(f"{name} has no flag")
            flags = [flag] if option.short is None else [option.short, flag]
            parser.add_argument(*flags, type=option.flag, default=default, help=option.help)
