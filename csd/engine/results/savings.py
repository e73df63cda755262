"""Words on what saved a prompt's samples time: equal beginnings, drafts, or neither.

`told` begins with the larger of the two, by counts. Where both save little, it names the changes
that save more (docs/howto/tune.md has the measured counts).
"""

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

from csd.engine.results.result import Samples
from csd.engine.results.stats import BEGINNING, COMPARED, PAYS, Stats

# product of the two gains from which on a call needs no advice
ENOUGH = 1.25
# temperature, number of samples and tokens of an answer that save more than others
LOW, MANY, LONG = 0.2, 8, 400


def told(out: Samples, temperature: float | None = None) -> str:
    """A sentence on what saved time. temperature: of the samples; None if it is not known."""
    stats, words = out.stats, []
    if alike := _alike(out):
        words.append(alike)
    if stats.pays and stats.nodes_accepted:
        words.append(
            f"{stats.nodes_accepted:,} of {stats.tokens:,} tokens were guessed right, "
            f"{stats.draft_gain:.2f} times as fast as without guesses"
        )
        if stats.tokens_per_step > shared(out):
            words.reverse()
    words = words or ["no equal beginnings and no guesses saved time"]
    advice = [*_advice(out, temperature)]
    if advice and shared(out) * (stats.draft_gain or 1.0) < ENOUGH:
        words.append(f"{', '.join(advice)} would save more")
    return "; ".join(words)


def shared(out: Samples) -> float:
    """Tokens of the samples, by those that are left if equal beginnings are read once."""
    texts = _beginnings(out.tokens)
    total = sum(map(len, texts))
    again = sum(common_tokens(a, b) for a, b in pairwise(texts))
    return total / (total - min(again, _saved(out.stats))) if total else 1.0


def _saved(stats: Stats) -> int:
    """Rows that samples in flight together shared, with those of their drafts."""
    return max(stats.sample_steps + stats.nodes_proposed - stats.rows, 0) if stats.rows else 0


def _alike(out: Samples) -> str:
    """Number of samples that began alike, and of tokens, where that saved time; or empty."""
    if shared(out) < PAYS:
        return ""
    count, length = alike(out.tokens)
    length = min(length, _saved(out.stats) // max(count - 1, 1))
    if length < 1:
        return ""
    of = "" if count == len(out) else f" of {len(out)}"
    tokens = "1 token" if length == 1 else f"{length} tokens"
    return f"{count}{of} answers began alike for {tokens}: read once"


def alike(texts: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Number of texts with a common beginning, and its length: the beginning that saves most.

    Read once for n texts, a beginning of L tokens saves (n - 1) L.
    """
    # in order, what two texts have in common those between them have too
    ordered, best = _beginnings(texts), (0, 0)
    for i, first in enumerate(ordered):
        for j in range(i + 1, len(ordered)):
            run = (j - i + 1, common_tokens(first, ordered[j]))
            best = max(best, run, key=lambda run: (run[0] - 1) * run[1])
    return best


def _beginnings(texts: Iterable[Sequence[int]]) -> list[list[int]]:
    """Beginnings of the first texts, in order."""
    return sorted(list(tokens[:BEGINNING]) for tokens in islice(texts, COMPARED))


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning of two texts."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _advice(out: Samples, temperature: float | None) -> Iterable[str]:
    """Changes of a call after which samples share more."""
    if temperature is None or temperature > 2 * LOW:
        yield f"a temperature of {LOW:g}"
    if len(out) < MANY:
        yield f"{MANY} samples or more"
    if 2 * out.stats.tokens < LONG * len(out):
        yield f"answers of {LONG} tokens"
