"""Arguments of `csd.Engine`, `csd.AsyncEngine` and the server, declared like those of a call.

A default stands here alone: signatures, docstrings and flags are made of these tables.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

from csd.engine.options.arguments import (
    MOST_SAMPLES,
    Budget,
    Drafter,
    EndOptions,
    LoadingOptions,
    Priors,
    Speculate,
    Tokenizer,
)
from csd.engine.options.checks import boolean, check_drafter, check_type, whole
from csd.utils.arguments import LARGEST, Option, Switch, check_flag, check_number, options_of

# far more than pay off; limited by the int32 index of a step's rows and the time to time its sizes
MAX_SLOTS = 4096
# with each step of lag, a finished sample takes one more step
MAX_LAG = 64


def check_exact(name: str, value: Any) -> Any:
    # the model's operations check the names
    return value if isinstance(value, str) else check_flag(name, value)


def check_prefix_cache(name: str, value: Any) -> float | Literal[False]:
    return False if value is False else check_number(name, value, 0, 1)


class SizeOptions(TypedDict, total=False):
    """Memory, backend and steps of an engine."""

    tokenizer: Tokenizer
    max_slots: Annotated[
        int,
        whole(
            64,
            f"maximum number of samples in flight, up to {MAX_SLOTS}; fewer if memory is short",
            low=1,
            high=MAX_SLOTS,
            also=("--max-num-seqs",),
        ),
    ]
    memory: Annotated[
        float,
        Option(
            0.9,
            "share of the free memory that caches and a step's rows may take, in (0, 1]",
            partial(check_number, low=0, high=1, above=True),
            float,
            also=("--gpu-memory-utilization",),
        ),
    ]
    prefill_chunk: Annotated[
        int,
        whole(
            512,
            "most prompt tokens read per pass. While samples are in flight, a longer prompt is "
            "read one chunk at a time, between two of their steps",
            low=1,
            flag=None,
        ),
    ]
    kernels: Annotated[
        str | None,
        Option(
            None,
            'backend "reference", "cpu" or "triton" (`csd.kernels.backends`); by default the one '
            "that fits the device and the dtype. `engine.ops.name` is the backend in use",
        ),
    ]
    static: Annotated[
        bool | None,
        boolean(
            None,
            "whether steps have fixed shapes and never read the device, as CUDA graphs need; by "
            'default on a GPU. Drafters that read the device, and verifiers other than "match", '
            "run without fixed shapes",
            flag=None,
        ),
    ]
    lag: Annotated[
        int | None,
        whole(
            None,
            f"number of steps that the host stays behind the device, at most {MAX_LAG}; by default "
            "1 if steps are static. Results do not depend on it",
            high=MAX_LAG,
            flag=None,
        ),
    ]
    together: Annotated[
        int | None,
        whole(
            None,
            "most samples of a prompt in flight while other prompts wait; by default one, or a "
            "quarter of a request's samples in an `AsyncEngine`. Later samples draft from finished "
            "ones. Results do not depend on it, except for the order in which samples finish",
            low=1,
            flag=None,
        ),
    ]
    self_check: Annotated[
        bool,
        boolean(
            True,
            "whether the first engine on a GPU checks its kernels there, as `csd doctor` does, "
            "before a model is loaded, once per machine, version, dtype and sizes of heads and "
            "vocabulary. Raises RuntimeError if a kernel is wrong",
            flag=None,
        ),
    ]
    exact: Annotated[
        bool | Literal["cublas", "portable"] | None,
        Option(
            None,
            "whether the bits of tokens and log-probabilities are independent of drafts and batch, "
            "in bfloat16, float16 and float32. By default if that costs no time, as in bfloat16 on "
            "CPUs that multiply it; `engine.exact` is the value in use. On a GPU, products run in "
            'Triton, or with "cublas" in cuBLAS, in blocks of 64 rows. See docs/exact.md. With '
            '"portable" the bits are the same on every x86 CPU, in float32 and with packed '
            "weights, or an error names the operation that prevents it (docs/portable.md)",
            check_exact,
            (
                Switch(True, "produce the same bits under any load, even where that is slower"),
                Switch("portable", "produce the same bits on every x86 CPU, or refuse to start"),
            ),
        ),
    ]
    prefix_cache: Annotated[
        float | Literal[False],
        Option(
            0.1,
            "share of the memory that a call leaves, in [0, 1], for keys and values of prompts "
            "that have ended, so that later prompts with the same beginning do not read it again. "
            "False: every prompt is read whole. See docs/prefix_cache.md",
            check_prefix_cache,
            (
                Switch(
                    False,
                    "read every prompt whole; by default requests of one key, or with --share all, "
                    "reuse keys and values of earlier prompts with the same beginning",
                ),
            ),
        ),
    ]
    share_rows: Annotated[
        bool,
        Option(
            True,
            "whether samples of a prompt share the model's rows while their texts are equal. "
            "Results do not depend on it, except for rounding where `exact` is false. On a GPU "
            "and in static steps, rows are not shared yet",
            check_flag,
            (Switch(False, "compute a row of the model for each sample, also of equal texts"),),
        ),
    ]


class SharedOptions(SizeOptions, LoadingOptions, total=False):
    """Arguments that an `Engine` and an `AsyncEngine` share."""


class EngineOptions(SharedOptions, total=False):
    """The keyword arguments of `csd.Engine`."""

    drafter: Annotated[
        str | Callable | None,
        Option("consensus", "drafter of calls that name none, as in `csd.generate`", check_drafter),
    ]


class RequestsOptions(TypedDict, total=False):
    """Arguments of an `AsyncEngine` that apply to all its requests."""

    speculate: Speculate
    drafter: Drafter
    prior: Priors
    budget: Budget
    max_tokens: Annotated[
        int | None,
        whole(
            None,
            "maximum number of tokens of a prompt and one of its samples together; by default the "
            "model's context, or less if memory is short",
            low=2,
            also=("--max-model-len",),
        ),
    ]
    max_queue: Annotated[int, whole(512, "maximum number of requests waiting for a slot", low=1)]
    learn_from: Annotated[
        Collection[str],
        Option(
            (),
            "owners (see `submit`) with a prior of their own, which begins as `prior`, learns from "
            "their answers and drafts for their requests alone; `priors` has them by owner",
        ),
    ]


class ServiceOptions(RequestsOptions, SharedOptions, total=False):
    """The keyword arguments of `csd.AsyncEngine`."""


class WarmupOptions(TypedDict, total=False):
    """The keyword arguments of `Engine.warmup`: the largest sizes of the calls that follow."""

    num_samples: Annotated[
        int, whole(16, "number of samples per prompt", low=1, high=MOST_SAMPLES, short="-n")
    ]
    prompt_tokens: Annotated[int, whole(512, "number of tokens of the longest prompt", low=2)]
    max_new_tokens: Annotated[
        int,
        whole(
            options_of(EndOptions)["max_new_tokens"][1].off,
            "maximum number of new tokens per sample",
            low=1,
            high=LARGEST,
        ),
    ]


class ServerOptions(TypedDict, total=False):
    """Address of a server, limits of its clients, their tools, and the time of its end."""

    host: Annotated[
        str,
        Option(
            "127.0.0.1",
            "address to listen on; 0.0.0.0 also accepts other machines",
            partial(check_type, kinds=(str,), expected="a name or an address"),
            str,
        ),
    ]
    port: Annotated[int, whole(8000, "port to listen on; 0 takes a free one", high=65535)]
    tool_call_parser: Annotated[
        str,
        Option(
            "auto",
            "format of calls of tools in the model's texts: hermes, qwen3_coder, llama3_json or "
            "mistral; auto, the default, is that of the tokenizer's response template or of the "
            "chat template, and none leaves them text",
            # `csd.serve` has the formats, and checks it
            partial(check_type, kinds=(str,), expected="the name of a format"),
            str,
        ),
    ]
    group_window: Annotated[
        float,
        Option(
            0.0,
            "milliseconds within which requests of one address with equal prompts, and without a "
            "key and a seed, become one group, as if one request had asked for all their choices; "
            "0, the default: never",
            partial(check_number, low=0),
            float,
        ),
    ]
    max_n: Annotated[int, whole(128, "maximum number of choices per request", low=1)]
    max_body: Annotated[int, whole(2 << 20, "maximum size of a request's body, in bytes", low=1)]
    max_requests: Annotated[int, whole(1024, "maximum number of requests answered at once", low=1)]
    max_connections: Annotated[int, whole(2048, "maximum number of open connections", low=1)]
    drain: Annotated[
        float,
        Option(
            30.0,
            "seconds in which accepted requests may finish when the server shuts down",
            partial(check_number, low=0, high=86400),
            float,
        ),
    ]
