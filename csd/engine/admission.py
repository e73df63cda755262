"""Admission of a request that arrives while an engine runs, by the step as it is now."""

from collections.abc import Sequence
from typing import Any

from csd.engine.requests.request import LiveSample, Request, check_served
from csd.engine.requests.slot_edits import Refill
from csd.engine.rules.changes import Changes
from csd.engine.rules.tables import asked_of, changes_rows, set_of
from csd.engine.step.step import Step


def admit(
    step: Step,
    request: Request,
    active: Sequence[Request],
    owners: Sequence[LiveSample | None],
    tokenizer: Any,
) -> None:
    """Cut a request's history to fit, and set the step's rules for it and the active requests.

    owners: each slot's sample. Raises ValueError if the request cannot be served.
    """
    check_served([request], step.decoder.config)
    if request.history:
        used = None
        if step.drafter is not None:
            used = step.drafter.max_history(request.history, len(owners))
        if used is None:
            raise ValueError("history needs drafter='consensus' and speculate=True")
        request.progress.stats.history_left_out += sum(map(len, request.history[used:]))
        request.history = request.history[:used]
        request.progress.stats.history_tokens = sum(map(len, request.history))
    _admit_rules(step, request, active, owners, tokenizer)
    request.progress.stats.name_decoder(step.decoder)


def _admit_rules(
    step: Step,
    request: Request,
    active: Sequence[Request],
    owners: Sequence[LiveSample | None],
    tokenizer: Any,
) -> None:
    """Set the step's changes of rows to those of `request` and all active requests."""
    before = step.changes
    if before is None and not changes_rows(request.params):
        return
    requests = [*active, request]
    asked = asked_of(requests)
    if before is not None and asked == before.asked and set_of(request.params) in before.sets:
        return
    if asked.host and step.static:
        raise ValueError("grammars run on the host: they need an engine with static=False")
    slots, vocab = step.slots, step.decoder.config.vocab
    made = Changes.of_call(requests, slots, vocab, before, step.static, tokenizer)
    if made is not None:
        # new matchers read the tokens that their samples have committed
        refills = [
            Refill(s, live.request, live.index, live.pages)
            for s, live in enumerate(owners)
            if live is not None
        ]
        for refill in refills:
            made.begin(refill)
        made.fill(refills)
    step.changes = made
