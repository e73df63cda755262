"""Models and traces of the sections."""

from dataclasses import replace

import torch

import csd
from bench.gpu.lib.section import Section
from bench.lib.forced import cut, forced_requests, forcing
from bench.lib.record import TRACES
from bench.lib.shapes import SHAPES, random_model
from bench.micro.timing import copies_for
from csd.engine.call import RunSettings
from csd.engine.results.result import Samples
from csd.models.fused.config import ModelConfig
from csd.traces.traces import Trace, read_traces

TEMPERATURE = 0.7
LARGE = ("llama-3.1-8b", "qwen2.5-7b")
# for a GPU with less than LARGE_MEMORY bytes, which the weights of a large one would fill
SMALL = ("qwen2.5-0.5b",)
LARGE_MEMORY = 32 << 30
# (call, section) -> shapes: the second call adds the other shape to the first one's figures
SECOND = {(2, "doctor"): LARGE, (2, "compile"): LARGE, (2, "end_to_end"): LARGE[1:]}
# all recorded token ids are below this; every shape's vocabulary must be at least as large
RECORDED_VOCAB = 49152


def shapes(section: Section) -> dict[str, ModelConfig]:
    """Shapes of a section by name: both large ones on a GPU, or a small one, a tiny one on a CPU.

    In a call of a lent GPU all sections have the first one, but for those of `SECOND`.
    """
    if section.cuda:
        names = LARGE if torch.cuda.mem_get_info(section.device)[1] >= LARGE_MEMORY else SMALL
        if section.call and names is LARGE:
            names = SECOND.get((section.call, section.name), LARGE[:1])
        return {name: SHAPES[name] for name in names}
    return {"tiny": replace(SHAPES["tiny"], vocab=RECORDED_VOCAB, context=2048)}


def model(section: Section, config: ModelConfig):
    """Returns a model with random weights on the device; in the section's dtype."""
    return random_model(config, section.device, section.dtype)


def engine_of(section: Section, config: ModelConfig, **options) -> csd.Engine:
    """Returns an engine of `model` without self-check, since `doctor` has checked its kernels."""
    return csd.Engine(model(section, config), self_check=False, **options)


def recorded(section: Section) -> list[Trace]:
    """Returns the traces at temperature 0.7; on a CPU only their first tokens."""
    traces = [t for t in read_traces(TRACES) if t.temperature == TEMPERATURE]
    longest = None if section.cuda else 10
    return [cut(t, len(t.samples), longest) for t in traces]


def groups(traces: list[Trace], samples: int, turn: int = 0) -> list[Trace]:
    """Traces with `samples` samples: of one prompt that has enough, else of the largest prompts.

    turn: index among the prompts that have enough.
    """
    enough = [t for t in traces if len(t.samples) >= samples]
    if enough:
        # prompts with fewer recorded samples first: 64 recorded ones are no better for drawing 4
        enough.sort(key=lambda t: len(t.samples))
        return [cut(enough[turn % len(enough)], samples)]
    picked, left = [], samples
    for trace in sorted(traces, key=lambda t: -len(t.samples)):
        if left:
            picked.append(cut(trace, left))
            left -= len(picked[-1].samples)
    return picked


def forced(engine: csd.Engine, traces: list[Trace], prompt_tokens: int, **options):
    """Returns a function that runs the traces' samples through `engine`.

    options: those of `Engine.run`. Call the function within `forcing(engine, traces)`. It returns
    each prompt's `Samples`, and raises RuntimeError if they differ from the recorded ones.
    """

    def run(**more) -> list[Samples]:
        requests = forced_requests(traces, prompt_tokens=prompt_tokens)
        for _ in engine.run(requests, RunSettings(**options, **more)):
            pass
        results = [request.result() for request in requests]
        for result, trace in zip(results, traces, strict=True):
            if result.tokens != trace.samples:
                raise RuntimeError(f"the engine did not commit trace {trace.problem!r}")
        return results

    return run


__all__ = ["engine_of", "forced", "forcing", "groups", "recorded", "shapes"]


def matrices(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of the matrices of a layer, by name."""
    return {
        "qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
        "out": (c.hidden, c.heads * c.head_dim),
        "gate_up": (2 * c.intermediate, c.hidden),
        "down": (c.hidden, c.intermediate),
    }


def weights_of(n: int, k: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random matrices of a product that together exceed the cache."""
    return [torch.randn(n, k, device=device).to(dtype) for _ in range(copies_for(2 * n * k))]


def moved(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Bytes of a product's operands."""
    return sum(t.numel() * t.element_size() for t in (x, weight))
