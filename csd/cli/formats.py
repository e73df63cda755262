"""Formats of the command's JSON output: each object has the name of its format and a version."""

from typing import Annotated, Any, NotRequired, TypedDict

from csd.engine.result_schema import SCHEMA
from csd.engine.traces.traces import TraceLine
from csd.evaluate.evaluation import Row
from csd.schema.json_schema import json_schema

# incremented when a key is removed or changes its meaning, but not for a new key
VERSION = 1


class Interval(TypedDict):
    """A mean over problems with its 95% interval."""

    value: float
    low: float
    high: float


class AtK(TypedDict):
    """Accuracy and cost of k samples of a problem, on average over its samples."""

    k: Annotated[int, "number of samples per problem"]
    maj_at_k: Annotated[
        Interval,
        "share of problems whose majority answer is right; for k = 1 the accuracy of single "
        "samples",
    ]
    pass_at_k: Annotated[
        Interval | None,
        "share of problems with at least one right answer among k samples; null for k above "
        "samples_counted",
    ]
    tokens: Annotated[float, "tokens of k samples, over all problems"]
    seconds: Annotated[float, "time of the run, in proportion to these tokens"]


class Summary(TypedDict):
    """Output of `csd eval`, also written to its file .summary.json."""

    problems: int
    samples: Annotated[int, "requested samples per problem"]
    samples_counted: Annotated[
        int, "samples per problem from which accuracy and pass@k are estimated"
    ]
    samples_drawn: int
    answered: Annotated[float, "share of the samples that have an answer"]
    limited: Annotated[int, "number of samples cut at max_new_tokens"]
    thoughts_cut: Annotated[int, "number of samples whose thought was ended by max_thinking_tokens"]
    finish_reasons: Annotated[dict[str, float], "share of the samples by finish reason"]
    by_k: Annotated[list[AtK], "accuracy and cost for k = 1, 2, 4, ... samples"]
    tokens: int
    tau: Annotated[float, "tokens per step of a sample"]
    seconds: float
    tokens_per_second: float


class ReplayRow(TypedDict):
    nodes: Annotated[int, "maximum number of drafted tokens per sample and step"]
    tau: Annotated[float, "tokens per step of a sample"]
    nodes_used: Annotated[float, "mean number of tokens drafted per sample and step"]
    speedup: Annotated[
        float | None, "expected speed-up over one token per step; null without step times"
    ]


class Replay(TypedDict):
    """Output of `csd replay --json`."""

    prompts: int
    drafter: str
    rows: list[ReplayRow]


class Audit(TypedDict):
    """Output of `csd audit --json`: counts of samples and of tokens."""

    samples: int
    samples_different: int
    tokens: int
    equal: int
    ties: int
    different: int
    different_share: float
    tie: Annotated[float, "largest gap between two perturbed scores that counts as a tie"]
    own_different_share: NotRequired[
        Annotated[
            float,
            "with --calibrate: the share of different tokens in samples of this model, an "
            "estimate of false positives",
        ]
    ]


class Check(TypedDict):
    name: str
    calls: int
    error: str | None
    worst: Annotated[float, "largest floating-point error, relative to the allowed one"]


class DoctorReport(TypedDict):
    device: str
    dtype: str
    kernels: str
    versions: dict[str, str]
    checks: list[Check]
    notes: list[str]
    seconds: float


class Doctor(TypedDict):
    """Output of `csd doctor --json`."""

    passed: bool
    reports: list[DoctorReport]
    error: NotRequired[str]
    admission: NotRequired[
        Annotated[dict[str, str], "the decoder that runs the model, and the reason"]
    ]


class SampleTexts(TypedDict):
    """Fields that `csd sample --json` adds to `csd.Samples.to_dict`."""

    model: str
    pieces: NotRequired[Annotated[dict[str, str], "text of each token id"]]
    prompt: NotRequired[str]
    characters: NotRequired[
        Annotated[
            list[dict[str, str]],
            "by sample: texts of tokens that are parts of a character, by position",
        ]
    ]
    drafts: NotRequired[Annotated[list[list[dict]], "with --drafts: the draft tree of each step"]]


KINDS: dict[str, Any] = {
    "sample": SampleTexts, "summary": Summary, "results": Row, "trace": TraceLine,
    "replay": Replay, "audit": Audit, "doctor": Doctor,
}  # fmt: skip
# command that prints or writes each format
FROM = {
    "sample": "csd sample --json",
    "summary": "csd eval: standard output and FILE.summary.json",
    "results": "csd eval -o FILE: a line with the settings, then one line per problem",
    "trace": "csd record -o FILE and record=: one line per prompt",
    "replay": "csd replay --json",
    "audit": "csd audit --json",
    "doctor": "csd doctor --json",
}
# formats of a file's lines, which are identified by the file's first line or name
UNSTAMPED = ("results", "trace")


def stamped(name: str, found: dict) -> dict:
    """Returns an output with the name of its format and the version in front."""
    return {"schema": f"csd.{name}", "version": VERSION} | found


def schema_of(name: str) -> dict:
    """Returns the JSON schema of a format of KINDS."""
    found = json_schema(KINDS[name])
    if name == "sample":
        found["properties"] = SCHEMA["properties"] | found["properties"]
        found["required"] = [*SCHEMA["required"], *found["required"]]
    if name not in UNSTAMPED:
        stamp = {"schema": {"const": f"csd.{name}"}, "version": {"const": VERSION}}
        found["properties"] = stamp | found["properties"]
        found["required"] = [*stamp, *found["required"]]
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": f"csd.{name}", "description": FROM[name]} | found
