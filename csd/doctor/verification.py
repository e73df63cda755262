"""Time of verification in a step, with the settings of a model's generation config and without."""

import time
from typing import Any

import torch

from csd.engine.engine import Engine
from csd.engine.requests.slot_edits import seen_words
from csd.state.filters import FILTERS
from csd.state.slots import Slots

# standard deviation of the logits: the likeliest of 49,152 tokens then has probability 0.6 on
# average, and SmolLM2 gives its likeliest token 0.5 on plain text
LOGIT_STD = 6.0
# tokens that a repetition penalty has seen, as many as a prompt and an answer have
SEEN = 512
REPEATS = 5


def verification(engine: Engine, rows: int) -> dict[str, Any]:
    """Milliseconds to verify `rows` rows of random logits, one of each slot.

    Returns `settings`: those of the model's generation config that are not off, `milliseconds` with
    them, and `without`: with the same temperature and all others off. Each is the least of REPEATS.
    """
    (request,) = engine.prepare([0], seed=0, max_new_tokens=1).requests
    own = {name: getattr(request.params, name) for name in FILTERS}
    vocab, dtype = engine.config.vocab, engine.dtype
    slots = Slots.empty(rows, vocab, 1, 1, torch.promote_types(dtype, torch.float32), engine.device)
    slots.group.zero_()
    slots.live.fill_(True)
    slots.context[:, 0] = 0
    slots.max_new.fill_(1)
    slots.seen.copy_(seen_words([*range(min(SEEN, vocab))], slots.seen.shape[1]))
    random = torch.Generator().manual_seed(0)
    logits = LOGIT_STD * torch.randn(rows, vocab, generator=random)
    logits, pool = logits.to(engine.device, dtype), engine.ops.roots(slots, rows)

    def seconds(settings: dict[str, Any]) -> float:
        for name, value in settings.items():
            getattr(slots, name).fill_(value)
        times = []
        # the first one may compile
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            engine.ops.verify(logits, pool, slots)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    plain = FILTERS | {"temperature": own["temperature"]}
    return {
        "settings": {name: value for name, value in own.items() if value != FILTERS[name]},
        "milliseconds": round(1000 * seconds(own), 2),
        "without": round(1000 * seconds(plain), 2),
    }


def shown_verification(result: dict[str, Any], rows: int, steady: bool = True) -> str:
    """The times as text. steady: False if other work ran while the steps were timed."""
    text = f"verifying {rows} rows takes a step another {result['milliseconds']:.2f} ms"
    settings = ", ".join(f"{name} {value:g}" for name, value in result["settings"].items())
    if settings:
        text += f" with the settings of the generation config ({settings}), and "
        text += f"{result['without']:.2f} ms with its temperature alone"
    else:
        text += "; the generation config has no settings"
    return text if steady else f"{text}; beside other work, which lengthens it"
