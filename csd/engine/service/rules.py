"""What requests in flight ask of rows, brought up to date as one more is admitted."""

from collections.abc import Sequence
from typing import Any

from csd.engine.changes import Changes
from csd.engine.requests import LiveSample, Request
from csd.engine.rules import asked_of, changes_rows, set_of
from csd.engine.slot_edits import Refill
from csd.engine.step import Step


def admit_rules(
    step: Step,
    active: Sequence[Request],
    request: Request,
    owners: Sequence[LiveSample | None],
    tokenizer: Any,
) -> None:
    """The step changes rows as `request` asks, beside those that are `active`.

    owners: the samples in the slots, which keep their rules. Raises ValueError for rules that a
    static step cannot follow, and leaves the step as it was.
    """
    before = step.changes
    if before is None and not changes_rows(request.params):
        return
    asked = asked_of([*active, request])
    if before is not None and asked == before.asked and set_of(request.params) in before.sets:
        return
    if asked.host and step.static:
        raise ValueError("grammars run on the host: they need an engine with static=False")
    slots, vocab = step.slots, step.decoder.config.vocab
    made = Changes.of_call([*active, request], slots, vocab, before, step.static, tokenizer)
    if made is not None:
        # a matcher that is new reads what its sample has committed
        made.fill([
            Refill(s, live.request, live.index, live.pages)
            for s, live in enumerate(owners)
            if live is not None
        ])  # fmt: skip
    step.changes = made
