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

    k: Annotated[int, "samples of a problem"]
    maj_at_k: Annotated[Interval, "share of problems whose vote is right; k = 1 is the accuracy"]
    pass_at_k: Annotated[
        Interval | None, "share of problems with a right sample among k; null beyond what counts"
    ]
    tokens: Annotated[float, "of k samples for all problems"]
    seconds: Annotated[float, "of the run, as much as these tokens are a share of its"]


class Summary(TypedDict):
    """Output of `csd eval`, also written to its file .summary.json."""

    problems: int
    samples: Annotated[int, "asked for, of each problem"]
    samples_counted: Annotated[int, "of each problem, by which accuracy and pass@k are estimated"]
    samples_drawn: int
    answered: Annotated[float, "share of the samples that count with an answer"]
    limited: Annotated[int, "samples that were cut at max_new_tokens"]
    thoughts_cut: Annotated[int, "samples whose thought max_thinking_tokens ended"]
    finish_reasons: Annotated[dict[str, float], "shares of the samples"]
    by_k: Annotated[list[AtK], "accuracy and cost for k = 1, 2, 4, ... samples"]
    tokens: int
    tau: Annotated[float, "tokens per step of a sample"]
    seconds: float
    tokens_per_second: float


class ReplayRow(TypedDict):
    nodes: Annotated[int, "drafted tokens a sample and step, at most"]
    tau: Annotated[float, "tokens per step of a sample"]
    nodes_used: Annotated[float, "what was drafted of them"]
    speedup: Annotated[float | None, "over one token a step; null without step times"]


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
    tie: Annotated[float, "gap of perturbed scores that is a tie"]
    own_different_share: NotRequired[Annotated[float, "with --calibrate, of false positives"]]


class Check(TypedDict):
    name: str
    calls: int
    error: str | None
    worst: Annotated[float, "largest error of a float, as a share of what is allowed"]


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
    admission: NotRequired[Annotated[dict[str, str], "which decoder runs the model, and why"]]


class SampleTexts(TypedDict):
    """Fields that `csd sample --json` adds to `csd.Samples.to_dict`."""

    model: str
    pieces: NotRequired[Annotated[dict[str, str], "the text of each token id"]]
    prompt: NotRequired[str]
    characters: NotRequired[
        Annotated[list[dict[str, str]], "by place, texts of tokens that are parts of a character"]
    ]
    drafts: NotRequired[Annotated[list[list[dict]], "with --drafts, each step's tree"]]


KINDS: dict[str, Any] = {
    "sample": SampleTexts, "summary": Summary, "results": Row, "trace": TraceLine,
    "replay": Replay, "audit": Audit, "doctor": Doctor,
}  # fmt: skip
# command that prints or writes each format
FROM = {
    "sample": "csd sample --json",
    "summary": "csd eval, on standard output and in FILE.summary.json",
    "results": "csd eval -o FILE, a line a problem behind one of settings",
    "trace": "csd record -o FILE and record=, a line a prompt",
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
