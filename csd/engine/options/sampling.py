"""Arguments for the samples' distribution: which samples, filters, penalties, bans and grammars."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, TypedDict

from csd.engine.options.checks import check_seed_or_none, or_none
from csd.engine.options.option import Option
from csd.engine.sampling import check_option
from csd.schema.arguments import LARGEST, check_whole

# most samples of a prompt per call: each is an object in memory
MOST_SAMPLES = 1 << 20


class SamplingOptions(TypedDict, total=False):
    """Arguments that decide which token is drawn at a position."""

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
            "with which the same samples are drawn again; by default one is drawn from torch's "
            "generator, and `out.seed` has it",
            check_seed_or_none,
            int,
        ),
    ]
    temperature: Annotated[
        float | None,
        Option(
            None,
            "0 is greedy; by default the model's generation config decides, else 1. This and the "
            "next four are as transformers defines them",
            or_none(check_option, "temperature"),
            float,
        ),
    ]
    top_k: Annotated[
        int | None,
        Option(
            None,
            "0 is off; tokens tied at the cut are all kept; by default as the generation config "
            "has it, else off",
            or_none(check_option, "top_k"),
            int,
        ),
    ]
    top_p: Annotated[
        float | None,
        Option(
            None,
            "nucleus sampling; 1 is off, as it is by default where the generation config has none",
            or_none(check_option, "top_p"),
            float,
        ),
    ]
    min_p: Annotated[
        float | None,
        Option(
            None,
            "least probability, as a share of the largest; 0 is off",
            or_none(check_option, "min_p"),
            float,
        ),
    ]
    repetition_penalty: Annotated[
        float | None, Option(None, "1 is off", or_none(check_option, "repetition_penalty"), float)
    ]
    logit_bias: Annotated[
        dict[int, float] | None,
        Option(
            None,
            "{token id: value} added to the model's logits; -inf bans. This and the next twelve "
            "change a sample's logits as its own prefix asks, before any filter; drafts do not "
            "change what is sampled",
            or_none(check_option, "logit_bias"),
        ),
    ]
    bad_words: Annotated[
        str | list[str] | list[list[int]] | None,
        Option(
            None,
            "strings or lists of token ids that are not sampled: the last token of a longer one "
            "is banned where the others come before it. A string is banned as its tokens with and "
            "without a space before",
            or_none(check_option, "bad_words"),
            list,
        ),
    ]
    allowed_token_ids: Annotated[
        list[int] | None,
        Option(
            None,
            "all other tokens are banned, end tokens too",
            or_none(check_option, "allowed_token_ids"),
        ),
    ]
    suppress_tokens: Annotated[
        list[int] | None,
        Option(None, "token ids that are banned", or_none(check_option, "suppress_tokens")),
    ]
    no_repeat_ngram_size: Annotated[
        int | None,
        Option(
            None,
            "n-grams of prompt and sample that do not come again; 0 is off",
            or_none(check_option, "no_repeat_ngram_size"),
            int,
        ),
    ]
    frequency_penalty: Annotated[
        float | None,
        Option(
            None,
            "taken off a token's logit for each time the sample has it already; 0 is off",
            or_none(check_option, "frequency_penalty"),
            float,
        ),
    ]
    presence_penalty: Annotated[
        float | None,
        Option(
            None,
            "taken off the logits of tokens that the sample has already; 0 is off",
            or_none(check_option, "presence_penalty"),
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
            or_none(check_option, "logits_processor"),
        ),
    ]
    max_thinking_tokens: Annotated[
        int | None,
        Option(
            None,
            "tokens of thought, after which the end of the thought is all that can follow; "
            "`out[i].forced` marks its tokens",
            or_none(check_option, "max_thinking_tokens"),
            int,
        ),
    ]
    thinking_tags: Annotated[
        Sequence[str | Sequence[int]] | None,
        Option(
            None,
            "what begins and ends a thought, by default as the chat template has it; a third is "
            "what is written to end it, itself with the end at its end",
            or_none(check_option, "thinking_tags"),
        ),
    ]
    json_schema: Annotated[
        dict | str | type | None,
        Option(
            None,
            "texts are JSON of this schema: a dict, its text or a class of pydantic; needs "
            "llguidance (`pip install csd[grammar]`), as the next two do. End tokens come only "
            "where the text is whole",
            or_none(check_option, "json_schema"),
        ),
    ]
    regex: Annotated[
        str | None,
        Option(None, "texts match this regular expression", or_none(check_option, "regex"), str),
    ]
    grammar: Annotated[
        str | None,
        Option(
            None,
            "texts are of this grammar, in the syntax of Lark",
            or_none(check_option, "grammar"),
            str,
        ),
    ]
