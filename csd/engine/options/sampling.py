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
