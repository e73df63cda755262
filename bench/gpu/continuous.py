"""`transformers` generate_batch, its continuous batching, at 16 and 64 samples of one prompt."""

import inspect

import torch
import transformers

from bench.gpu.outside import build
from bench.gpu.section import Section
from bench.gpu.workload import RECORDED_VOCAB

SAMPLES = (16, 64)


def run(section: Section) -> None:
    """Random weights of the Llama shape: the time of a step does not depend on them."""
    model = build(section)
    missing = refusal(model)
    if missing:
        section.add(transformers=transformers.__version__, note=missing)
        return
    prompt, new = (1024, 128) if section.cuda else (32, 4)
    ids = torch.randint(RECORDED_VOCAB, (prompt,)).tolist()
    for samples in SAMPLES if section.cuda else (2,):
        if section.left <= 0:
            section.cut_off(f"N={samples}")
            continue
        try:
            first = section.clock(lambda samples=samples: draw(model, ids, samples, new))
            again = section.clock(lambda samples=samples: draw(model, ids, samples, new))
        except Exception as error:
            # another library's: it is a result
            note = f"{type(error).__name__}: {error}"[:300]
            section.add(N=samples, transformers=transformers.__version__, note=note)
            continue
        section.add(
            N=samples,
            prompt=prompt,
            new_tokens=new,
            first_seconds=first,
            seconds=again,
            tokens_per_second=samples * new / again,
            transformers=transformers.__version__,
        )


def refusal(model) -> str | None:
    """Why this version of `transformers` cannot, or None."""
    if not hasattr(model, "generate_batch"):
        return "this version has no generate_batch"
    if "generation_config" not in inspect.signature(model.generate_batch).parameters:
        return "generate_batch of this version takes no generation_config"
    return None


def draw(model, ids: list[int], samples: int, new: int) -> None:
    """Raises RuntimeError where other than `samples` answers of `new` tokens come back."""
    config = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=True, temperature=0.7, top_k=0, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    # the same prompt many times: its pages may be shared
    found = model.generate_batch([ids] * samples, generation_config=config)
    lengths = [len(out.generated_tokens) for out in found.values()]
    if lengths != [new] * samples:
        raise RuntimeError(f"{samples} answers of {new} tokens were asked for, got {lengths}")
