"""What saved a prompt's samples time, in words: equal beginnings, drafts, or neither.

`told` begins with the larger of the two, by counts. Where both save little, it names the changes
that save more (docs/howto/tune.md has the measured counts).
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

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
        if stats.tokens_per_step > shared(stats):
            words.reverse()
    words = words or ["no equal beginnings and no guesses saved time"]
    advice = [*_advice(out, temperature)]
    if advice and shared(stats) * max(stats.draft_gain or 1.0, 1.0) < ENOUGH:
        words.append(f"{', '.join(advice)} would save more")
    return "; ".join(words)


def shared(stats: Stats) -> float:
    """Rows that the samples and drafts would have had alone, by those that the model computed."""
    return (stats.sample_steps + stats.nodes_proposed) / stats.rows if stats.rows else 1.0


def _alike(out: Samples) -> str:
    """How many samples began alike for how many tokens, where that saved rows; or empty."""
    if shared(out.stats) < PAYS:
        return ""
    count, length = alike([sample.tokens for sample in out])
    saved = out.stats.sample_steps + out.stats.nodes_proposed - out.stats.rows
    # samples that were not in flight together were not read together
    length = min(length, saved // max(count - 1, 1))
    if length < 1:
        return ""
    of = "" if count == len(out) else f" of {len(out)}"
    tokens = "1 token" if length == 1 else f"{length} tokens"
    return f"{count}{of} answers began alike for {tokens}: read once"


def alike(texts: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Number of texts with a common beginning, and its length: the beginning that saves most.

    Read once for n texts, a beginning of L tokens saves (n - 1) L.
    """
    # in order, the common beginning of a run is that of its ends: the least of its neighbours'
    ordered = sorted(list(tokens[:BEGINNING]) for tokens in [*texts][:COMPARED])
    best = (0, 0)
    for i, first in enumerate(ordered):
        for j in range(i + 1, len(ordered)):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(first, ordered[j], strict=False))
            length = sum(1 for _ in same)
            best = max(best, (j - i + 1, length), key=lambda run: (run[0] - 1) * run[1])
    return best


def _advice(out: Samples, temperature: float | None) -> Iterable[str]:
    """Changes of a call after which samples share more."""
    if temperature is None or temperature > 2 * LOW:
        yield f"a temperature of {LOW:g}"
    if len(out) < MANY:
        yield f"{MANY} samples or more"
    if 2 * out.stats.tokens < LONG * len(out):
        yield f"answers of {LONG} tokens"
