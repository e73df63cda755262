"""Rules of samples beyond filters, as tensors: one row for each different set of rules.

A slot has the row `of[s]`. Tensors keep their places from call to call where their sizes allow it,
so that a replayed step reads the rules of the call that runs.
"""

from dataclasses import dataclass

import torch

# in a pattern: any token
ANY = -2


@dataclass(frozen=True, slots=True)
class Asked:
    """The changes that a call's rows can need; steps of another call may need other ones."""

    bias: bool = False  # or bans that depend on nothing
    words: bool = False  # of several tokens
    ngram: int = 0  # the longest that must not come again
    early: bool = False  # end tokens are banned before `min_new`
    penalty: bool = False  # repetition penalty
    counts: bool = False  # presence or frequency penalty
    thought: bool = False  # a budget of it
    functions: bool = False  # of the host
    grammar: bool = False

    @property
    def host(self) -> bool:
        """True if rows are changed by what runs on the host."""
        return self.functions or self.grammar

    @property
    def prefix(self) -> bool:
        """True if rows' whole prefixes are read."""
        return self.words or self.ngram > 0 or self.counts or self.thought


@dataclass(slots=True)
class Rules:
    """S slots, R sets of rules, V vocabulary, P tokens of a prompt, B words of W tokens at most."""

    of: torch.Tensor  # [S] int64, the set of the slot's sample
    prompt: torch.Tensor  # [S, P] int32, the end of its prompt, right-aligned, -1 before
    empty: torch.Tensor  # [S] int32, 1 + the first place of the sample that had no token, else 0
    bias: torch.Tensor  # [R, V], added to logits: -inf is a ban
    words: torch.Tensor  # [R, B, W] int32, right-aligned, ANY before; -1 where there is none
    ngram: torch.Tensor  # [R] int64, tokens of an n-gram that must not come again, 0 is off
    presence: torch.Tensor  # [R] float64
    frequency: torch.Tensor  # [R] float64
    thought: torch.Tensor  # [R] int64, tokens of thought at most, -1 is off
    begin: torch.Tensor  # [R, X] int32, what begins a thought, right-aligned, ANY before
    end: torch.Tensor  # [R, X] int32, what ends it, likewise
    close: torch.Tensor  # [R, X] int32, what is forced to end it, left-aligned, -1 behind

    @classmethod
    def empty_of(
        cls,
        slots: int,
        vocab: int,
        *,
        sets: int,
        prompt: int,
        words: tuple[int, int],
        marks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Rules":
        """Rules that ask for nothing; words: B and W; marks: tokens of what begins or ends thought.

        dtype: of logits that are changed.
        """

        def full(*shape: int, fill: float = 0, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, fill, dtype=kind, device=device)

        return cls(
            of=full(slots, kind=torch.int64),
            prompt=full(slots, prompt, fill=-1),
            empty=full(slots),
            bias=full(sets, vocab, kind=dtype),
            words=full(sets, *words, fill=-1),
            ngram=full(sets, kind=torch.int64),
            presence=full(sets, kind=torch.float64),
            frequency=full(sets, kind=torch.float64),
            thought=full(sets, fill=-1, kind=torch.int64),
            begin=full(sets, marks, fill=-1),
            end=full(sets, marks, fill=-1),
            close=full(sets, marks, fill=-1),
        )
