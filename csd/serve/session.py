"""Sessions of an `AsyncEngine`, whose branches are continued while others wait for a tool."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Unpack

from csd.engine.options import Options
from csd.engine.results.result import Sample
from csd.engine.session import Branch, SessionTurns, requests_of, seed_of


class AsyncSession(SessionTurns):
    """A session of an `AsyncEngine`, which `AsyncEngine.session` makes.

    Turns of different branches may run at once. A branch that is not in a turn has no slot.
    """

    def __init__(
        self, service: Any, prompt: Any, num_samples: int, seed: int | None, owner: str | None
    ) -> None:
        engine = service.engine
        first = engine.prepare(prompt, num_samples=num_samples, seed=seed).requests
        if len(first) != 1:
            raise ValueError(f"prompt must be one prompt, got {len(first)}")
        vocab = engine.config.vocab
        super().__init__(first[0].prompt, num_samples, first[0].seed, engine.tokenizer, vocab)
        self.service = service
        # an owner of its own shares pages with its own turns alone
        self.owner = owner or f"session {secrets.token_hex(8)}"

    async def sample(
        self, branches: Sequence[Branch] | None = None, **options: Unpack[Options]
    ) -> list[Sample]:
        """Continue branches, by default all live ones; returns a sample for each.

        options: as in `AsyncEngine.submit`, except those that the session sets: number and indices
        of samples, seed, history and until. Raises as `submit` and `Reader.wait` do.
        """
        turn = self.of_turn(branches, options)
        readers = [
            self.service.submit(
                mates[0].prompt,
                owner=self.owner,
                stream=False,
                graph=self,
                answered=len(mates[0].tokens),
                num_samples=len(mates),
                first_sample=mates[0].path[-1],
                seed=seed_of(self.seed, mates[0].path[:-1]),
                **options,
            )
            for mates in requests_of(turn)
        ]
        outs = await asyncio.gather(*(reader.wait() for reader in readers))
        return self.end_turn(turn, outs)
