"""Data of the page and of its charts, computed from the output of `csd sample --json`."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from csd.engine.options.open_thought import leaves_thought_open
from csd.engine.results.result import Sample
from csd.evaluate.vote import Decision, vote
from csd.utils import check as schema
from csd.utils.check import AtLeast, Between, Token

# where a token may come from, and its name on the page
SOURCES = {
    "sampled": "sampled, not drafted",
    "own": "drafted from the sample itself",
    "sibling": "drafted from a sibling",
    "prompt": "drafted from the prompt",
    "history": "drafted from an earlier call's sample",
    "model": "drafted by a draft model",
    "prior": "drafted from answers to other prompts",
}
# of a draft's node, or of a token; "" if it was sampled
Source = Literal["", "own", "sibling", "prompt", "history", "model", "prior"]

Count = Annotated[int, Between(0, 2**53)]
# limited, since the page has one bar per step
Step = Annotated[int, Between(1, 10**6)]


class _Accepted(TypedDict):
    own: Count
    sibling: Count
    prompt: Count
    history: NotRequired[Count]
    model: NotRequired[Count]


class _Stats(TypedDict):
    tokens: Count
    steps: Count
    sample_steps: Count
    nodes_proposed: Count
    nodes_accepted: Count
    tokens_per_step: Annotated[float, Between(0)]
    accepted: _Accepted
    seconds: NotRequired[dict[str, float]]
    rows: NotRequired[Count]  # not in runs of versions without shared rows


class _Draft(TypedDict):
    step: Step
    at: Count
    tokens: list[Token]
    parents: list[Annotated[int, Between(-1, 63)]]
    probabilities: list[Annotated[float, Between(0, 1)]]
    sources: list[Source]
    path: list[Annotated[int, Between(0, 63)]]


class SampleOutput(TypedDict):
    """Output of `csd sample --json`: lists over samples, and lists over their tokens."""

    texts: Annotated[list[str | None], AtLeast(1)]  # None for a sample without a text
    tokens: list[list[Token]]
    logprobs: list[list[float | None]]  # None for a token without probability
    finish_reasons: list[str]
    sources: list[list[Source]]
    steps: list[list[Step]]
    prompt_ids: list[Token]
    pieces: dict[str, str]  # by token id
    stats: _Stats
    seed: int
    model: NotRequired[str]
    prompt: NotRequired[str]
    characters: NotRequired[list[dict[str, str]]]
    drafts: NotRequired[list[list[_Draft]]]
    forced: NotRequired[list[list[bool]]]
    in_thought: NotRequired[bool]  # not in runs of earlier versions


def check(result: Any) -> None:
    """Raise ValueError unless `result` is an output of `csd sample --json`."""
    try:
        schema.check(result, SampleOutput)
        _together(result)
    except ValueError as error:
        raise ValueError(f"expected the object of csd sample --json, which {error}") from error


def _together(result: Any) -> None:
    """Check that lists over the same samples or tokens have equal lengths."""
    tokens, of_tokens = result["tokens"], ("logprobs", "sources", "steps")
    for name in (*of_tokens, "texts", "finish_reasons", "characters", "drafts", "forced"):
        if len(result.get(name, tokens)) != len(tokens):
            raise ValueError(
                f"must have one entry of {name!r} per sample ({len(tokens)}), got "
                f"{len(result[name])}"
            )
    for name in of_tokens:
        for i, (of, ids) in enumerate(zip(result[name], tokens, strict=True)):
            if len(of) != len(ids):
                raise ValueError(
                    f"must have {len(ids)} entries in '{name}[{i}]', one per token, got {len(of)}"
                )
    drafts = [draft for sample in result.get("drafts", []) for draft in sample]
    for draft in drafts:
        if len({len(draft[n]) for n in ("tokens", "parents", "probabilities", "sources")}) > 1:
            raise ValueError(
                f"must have lists of equal length in a draft, got {schema.shown(draft)}"
            )
    texts = (result["prompt_ids"], *tokens, *(draft["tokens"] for draft in drafts))
    for i in {i for text in texts for i in text}:
        if str(i) not in result["pieces"]:
            raise ValueError(f"must have the text of token {i} in 'pieces'")


def pieces(result: dict, ids: list[int]) -> list[str]:
    return [result["pieces"][str(i)] for i in ids]


def text_between(result: dict, sample: int, start: int, end: int) -> str:
    """Text of a sample's tokens [start, end)."""
    whole = characters(result, sample)
    texts = pieces(result, result["tokens"][sample][start:end])
    return "".join(whole.get(str(start + i), text) for i, text in enumerate(texts))


def characters(result: dict, sample: int) -> dict[str, str]:
    """Texts, by position, of tokens that are parts of a character and differ from their pieces."""
    every = result.get("characters")
    return every[sample] if every else {}


def decision(result: dict) -> Decision:
    # runs of versions without thinking budgets have no forced tokens
    forced = result.get("forced") or [[] for _ in result["texts"]]
    rows = zip(result["texts"], result["finish_reasons"], forced, strict=True)
    prompt = "".join(pieces(result, result["prompt_ids"]))
    inside = result.get("in_thought", leaves_thought_open(prompt))
    return vote(
        [
            Sample(i, text, [], [], [], reason, forced=places, in_thought=inside)
            for i, (text, reason, places) in enumerate(rows)
        ]
    )


def votes(decision: Decision) -> list[dict[str, Any]]:
    """Answers with their samples, most votes first, None last: dicts of answer, samples, voted."""
    names: dict[str | None, list[int]] = {}
    for i, answer in enumerate(decision.answers):
        names.setdefault(answer, []).append(i)
    order = sorted(names, key=lambda a: (a is None, -len(names[a]), names[a][0]))
    won = None if decision.tied else decision.answer
    return [{"answer": a, "samples": names[a], "voted": a is not None and a == won} for a in order]


def steps(result: dict) -> dict[str, Any]:
    """Lists over steps: `live` samples in flight, and tokens per live sample from each source."""
    last = max((s[-1] for s in result["steps"] if s), default=0)
    counts = {source: [0] * last for source in SOURCES}
    live = [0] * last
    for steps, sources in zip(result["steps"], result["sources"], strict=True):
        for step, source in zip(steps, sources, strict=True):
            counts[source or "sampled"][step - 1] += 1
        for step in set(steps):
            live[step - 1] += 1
    shares = {
        source: [c / max(n, 1) for c, n in zip(values, live, strict=True)]
        for source, values in counts.items()
        if any(values)
    }
    return {"live": live, "sources": shares}


def divergence(tokens: list[list[int]]) -> list[dict]:
    """Tree of the samples' common prefixes; each node is a run of tokens without a fork.

    A node has its depth, the samples that pass it, and [start, end), the positions of the tokens
    that these share. It comes before those that go on from it; the first is the root, the common
    prefix of all samples.
    """
    nodes: list[dict] = []
    # no recursion: every sample may fork once, which makes the tree deep
    waiting = [(0, list(range(len(tokens))), 0)]
    while waiting:
        depth, samples, start = waiting.pop()
        end = start
        while len({_at(tokens[i], end) for i in samples}) == 1 and end < len(tokens[samples[0]]):
            end += 1
        nodes.append(dict(depth=depth, start=start, end=end, samples=samples))
        if len(samples) == 1:
            continue
        branches: dict[int | None, list[int]] = {}
        for i in samples:
            branches.setdefault(_at(tokens[i], end), []).append(i)
        # samples that are equal up to their end do not fork
        if len(branches) > 1:
            waiting += [(depth + 1, branch, end) for branch in reversed(branches.values())]
    return nodes


def shared_runs(result: dict) -> list[dict]:
    """Nodes of the divergence with their texts."""
    nodes = divergence(result["tokens"])
    return [
        node | {"text": text_between(result, node["samples"][0], node["start"], node["end"])}
        for node in nodes
    ]


def alone_from(tokens: list[list[int]]) -> list[int | None]:
    """Per sample, the first position from which no other sample shares its prefix, or None."""
    positions: list[int | None] = [None] * len(tokens)
    for node in divergence(tokens):
        if len(node["samples"]) == 1:
            positions[node["samples"][0]] = node["start"]
    return positions


def _at(tokens: list[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
