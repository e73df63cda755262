"""Admission of a request: checks that the current model, pages and step can serve it."""

from csd.engine.logit_changes import Changes
from csd.engine.requests import Request, check_served
from csd.engine.rules_from_options import asked_of, changes_rows, set_of
from csd.engine.scheduler import Scheduler
from csd.engine.slot_edits import Refill
from csd.state.kv_cache import pages_for


def pages_of(request: Request, prompt: bool) -> int:
    """Number of pages of one sample; prompt: True adds the pages of its prompt."""
    pages = pages_for(request.params.max_new_tokens)
    return pages + pages_for(len(request.prompt) - 1) if prompt else pages


def refusal(scheduler: Scheduler, request: Request, pages: int) -> Exception | None:
    """Admit a request: cut its history to fit and set the step's rules; None, or an error if
    refused.

    pages: number of pages that the caches have.
    """
    step = scheduler.step
    try:
        check_served([request], step.decoder.config)
    except ValueError as error:
        return error
    if pages_of(request, prompt=True) > pages:
        return ValueError(
            f"the prompt of {len(request.prompt)} tokens with "
            f"max_new_tokens={request.params.max_new_tokens} needs more than the {pages} pages "
            "available since the model was changed"
        )
    if request.history:
        kept = None
        if step.drafter is not None:
            kept = step.drafter.max_history(request.history, len(scheduler.owners))
        if kept is None:
            return ValueError("history needs drafter='consensus' and speculate=True")
        request.stats.history_left_out += sum(map(len, request.history[kept:]))
        request.history = request.history[:kept]
        request.stats.history_tokens = sum(map(len, request.history))
    return _admit_rules(scheduler, request)


def _admit_rules(scheduler: Scheduler, request: Request) -> Exception | None:
    """Set the step's changes of rows to those of `request` and all active requests.

    Returns the error if the request is refused.
    """
    step, before = scheduler.step, scheduler.step.changes
    if before is None and not changes_rows(request.params):
        return None
    requests = [*scheduler.active, request]
    asked = asked_of(requests)
    if before is not None and asked == before.asked and set_of(request.params) in before.sets:
        return None
    if asked.host and step.static:
        return ValueError("grammars run on the host: they need an engine with static=False")
    slots, vocab = step.slots, step.decoder.config.vocab
    made = Changes.of_call(requests, slots, vocab, before, step.static, scheduler.tokenizer)
    if made is not None:
        # new matchers read the tokens that their samples have committed
        refills = [
            Refill(s, live.request, live.index, live.pages)
            for s, live in enumerate(scheduler.owners)
            if live is not None
        ]
        for refill in refills:
            made.begin(refill)
        made.fill(refills)
    step.changes = made
    return None
