"""The engine's step with the settings of one call, over the same memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from csd.engine.call import RunSettings
from csd.engine.requests.request import Request
from csd.engine.rules.changes import Changes, log_uncaptured
from csd.engine.step.static_step import StaticStep
from csd.engine.step.step import Step
from csd.graph.drafter import Verifier
from csd.graph.registry import make_verifier
from csd.graph.teacher_forcing import TeacherForcing


def step_of_call(
    step: Step,
    requests: Sequence[Request],
    settings: RunSettings,
    drafter: Any,
    tokenizer: Any,
    before: Changes | None,
) -> Step:
    """Returns `step` with the settings of a call, over the same memory.

    before: row changes of earlier calls, whose tensors are reused if they fit.
    """
    drafter.start_call()
    verifier: Verifier | None = None
    # without drafts, or if sampling is greedy, every verifier just samples the target
    drawn = settings.speculate and settings.verifier != "match"
    if drawn and not requests[0].params.greedy:
        verifier = make_verifier(settings.verifier, drafter, step.ops)
    elif settings.forcing is not None:
        verifier = settings.forcing(step.ops, step.cache.rows)
    ops = step.ops
    if verifier is not None:
        step, ops = _dynamic(step), replace(ops, verify=verifier.verify)
    vocab, static = step.decoder.config.vocab, isinstance(step, StaticStep)
    changes = Changes.of_call(requests, step.slots, vocab, before, static, tokenizer)
    if changes is not None:
        changes.teacher_forced = isinstance(verifier, TeacherForcing)
    if changes is not None and changes.asked.host and static:
        log_uncaptured(step.slots.live.device)
        step = _dynamic(step)
        changes.static = False
    return replace(
        step,
        ops=ops,
        drafter=drafter,
        verifier=verifier,
        changes=changes,
        drafting=settings.speculate,
        top=settings.record_top,
        trees=settings.drafts,
        measures=settings.measures,
        seconds=step.no_seconds(),
    )


def _dynamic(step: Step) -> Step:
    """The same step with shapes that depend on the live slots."""
    if not isinstance(step, StaticStep):
        return step
    return Step(step.decoder, None, step.cache, step.slots, step.ops, share_rows=step.share_rows)
