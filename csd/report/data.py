"""What the page shows, counted from what `csd sample --json` printed."""

from csd.result import Sample
from csd.vote import Decision, vote

SOURCES = ("sampled", "own", "sibling", "prompt")
NEEDED = ("texts", "tokens", "logprobs", "finish_reasons", "sources", "steps", "prompt_ids",
          "pieces", "stats", "seed")  # fmt: skip


def check(result: object) -> None:
    """Raises ValueError when `result` is not what `csd sample --json` prints."""
    if not isinstance(result, dict):
        raise ValueError(f"expected the object of csd sample --json, got {type(result).__name__}")
    missing = [key for key in NEEDED if key not in result]
    if missing:
        raise ValueError(f"expected the object of csd sample --json, which has {missing[0]!r}")


def pieces(result: dict, ids: list[int]) -> list[str]:
    return [result["pieces"][str(i)] for i in ids]


def said(result: dict, sample: int, start: int, end: int) -> str:
    """The text of a sample's tokens from `start` to `end`."""
    whole = characters(result, sample)
    texts = pieces(result, result["tokens"][sample][start:end])
    return "".join(whole.get(str(start + i), text) for i, text in enumerate(texts))


def characters(result: dict, sample: int) -> dict[str, str]:
    """By place, tokens whose text is not their piece: several make up a character."""
    every = result.get("characters")
    return every[sample] if every else {}


def decision(result: dict) -> Decision:
    rows = zip(result["texts"], result["finish_reasons"], strict=True)
    return vote([Sample(i, text, [], [], [], reason) for i, (text, reason) in enumerate(rows)])


def tokens_per_step(result: dict) -> dict:
    """Lists over steps: `live` samples, and tokens committed from each of SOURCES."""
    last = max((s[-1] for s in result["steps"] if s), default=0)
    counts = {source: [0] * last for source in SOURCES}
    live = [0] * last
    for steps, sources in zip(result["steps"], result["sources"], strict=True):
        for step, source in zip(steps, sources, strict=True):
            counts[source or "sampled"][step - 1] += 1
        for step in set(steps):
            live[step - 1] += 1
    return {"live": live, **counts}


def divergence(tokens: list[list[int]]) -> list[dict]:
    """The samples' common prefixes as a tree, each node a run of tokens without a fork.

    A node: id, parent (-1 for the root), samples that pass it, and the tokens [start, end) that
    they share, at the same places in each of them. The root shares what all samples start with.
    """
    nodes: list[dict] = []

    def grow(parent: int, samples: list[int], start: int) -> None:
        end = start
        while len({_at(tokens[i], end) for i in samples}) == 1 and end < len(tokens[samples[0]]):
            end += 1
        number = len(nodes)
        nodes.append(dict(id=number, parent=parent, samples=samples, start=start, end=end))
        if len(samples) == 1:
            return
        branches: dict[int | None, list[int]] = {}
        for i in samples:
            branches.setdefault(_at(tokens[i], end), []).append(i)
        # samples equal to their end do not fork any more
        if len(branches) > 1:
            for branch in branches.values():
                grow(number, branch, end)

    grow(-1, list(range(len(tokens))), 0)
    return nodes


def alone_from(tokens: list[list[int]]) -> list[int | None]:
    """The place from which on no other sample has said the same; None where there is none."""
    found: list[int | None] = [None] * len(tokens)
    for node in divergence(tokens):
        if len(node["samples"]) == 1:
            found[node["samples"][0]] = node["start"]
    return found


def _at(tokens: list[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
