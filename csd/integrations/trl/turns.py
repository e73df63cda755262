"""Later turns of a batch's samples, after tools have added their answers.

A sample is a branch of a session (`csd.engine.session`) that starts with its prompt: a turn is
sampled with the noise of (seed, text so far) and with the sample's index, and the samples of one
prompt draft for each other. TRL passes the texts that go on, without their rows; a text begins with
that of its row at the end of the last turn.
"""

from dataclasses import dataclass, field
from typing import Any

from csd.engine.engine import Engine
from csd.engine.options.params import SamplingParams
from csd.engine.results.result import Sample
from csd.integrations.groups import draw


@dataclass(slots=True)
class Turns:
    """The samples of one batch of a process."""

    seed: int
    prompts: list[list[int]]  # of each row
    indices: list[int]  # sample index of each row
    texts: list[list[int]]  # prompt and completion of each row so far
    graphs: dict[tuple[int, ...], object] = field(default_factory=dict)  # of each prompt

    def draw(
        self,
        engine: Engine,
        texts: list[list[int]],
        params: SamplingParams,
        length: int,
        **running: Any,
    ) -> list[Sample]:
        """Draw one turn of each text.

        texts: in the order of their rows. length: limit of a row's tokens after its prompt; a text
        without room for a token gets one, which TRL cuts off. running: as in
        `csd.integrations.groups.draw`.
        """
        rows = self._rows_of(texts)
        requests, graphs = [], []
        for i, text in zip(rows, texts, strict=True):
            room = max(1, length - (len(text) - len(self.prompts[i])))
            limited = params.replace(max_new_tokens=min(params.max_new_tokens, room))
            requests.append((text, limited, range(self.indices[i], self.indices[i] + 1)))
            graphs.append(self.graphs.setdefault(tuple(self.prompts[i]), object()))
        drawn = draw(engine, requests, seed=self.seed, graphs=graphs, **running)
        samples = [of_text[0] for of_text in drawn]
        for i, text, sample in zip(rows, texts, samples, strict=True):
            self.texts[i] = [*text, *sample.tokens]
        return samples

    def _rows_of(self, texts: list[list[int]]) -> list[int]:
        rows: list[int] = []
        for text in texts:
            row = rows[-1] + 1 if rows else 0
            while row < len(self.texts) and self.texts[row] != text[: len(self.texts[row])]:
                row += 1
            if row == len(self.texts):
                raise RuntimeError(
                    "the trainer's texts must continue those of its rollout, in their order, got "
                    f"one of {len(text)} tokens that continues none"
                )
            rows.append(row)
        return rows
