"""A user's script, read by mypy with the checks of --strict and never run: `make lint`."""

from collections.abc import Generator
from typing import assert_type

import torch

import csd
from csd.evaluate.vote import Decision


def draw(model: str) -> None:
    out = csd.generate(model, "hello", num_samples=4, temperature=0.7, until=csd.Vote("boxed"))
    assert_type(out, csd.Samples)
    chat = [{"role": "user", "content": "hi"}]
    assert_type(csd.generate(model, chat), csd.Samples)
    assert_type(csd.generate(model, [1, 2, 3]), csd.Samples)
    assert_type(csd.generate(model, ["a", "b"]), list[csd.Samples])
    assert_type(csd.generate(model, [chat, chat]), list[csd.Samples])
    batch = torch.tensor([[1, 2]])
    both = csd.generate(model, batch, attention_mask=batch)
    assert isinstance(both, list)
    # mypy --warn-unused-ignores: without the misspelling, the comment would be an error
    csd.generate(model, "hello", temprature=0.7)  # type: ignore[call-overload]
    csd.generate(model, "hello", num_samples="4")  # type: ignore[call-overload]

    assert_type(out.texts, list[str | None])
    assert_type(out.tokens, list[list[int]])
    assert_type(out[0].logprobs, list[float])
    assert_type(out.stats.tokens_per_step, float)
    print(len(out) + len(both), out.seed, out.finish_reasons)

    decision = csd.vote(out, extract=lambda text: text[:1] or None, weight="probability")
    assert_type(decision, Decision)
    assert_type(decision.answer, str | None)
    assert_type(csd.best_of(out, length).sample, csd.Sample)
    right = [None if s.finish_reason == "cancelled" else s.text == "7" for s in out]
    assert_type(csd.pass_at_k(right, k=2), float)
    assert_type(csd.stream(model, "hello"), Generator[tuple[int, csd.Sample], None, None])
    with csd.Engine(model, max_slots=8) as engine:
        assert_type(engine.generate("hello", until=enough), csd.Samples)
        assert_type(engine.generate(["a", "b"]), list[csd.Samples])
    with csd.AsyncEngine(model, max_slots=8) as service:
        handle = service.submit("hello", num_samples=4, seed=0)
        assert_type([piece.text for piece in handle], list[str])
        assert_type(handle.result(), csd.Samples)
    csd.integrations.trl.Rollout(history=2)
    csd.integrations.trl.Rollout(histories=2)  # type: ignore[call-arg]
    assert_type(csd.remove_kernels(torch.nn.Linear(1, 1)), bool)
    csd.release()


def length(sample: csd.Sample) -> float:
    return float(len(sample.tokens))


def enough(samples: list[csd.Sample]) -> bool:
    return len(samples) > 2
