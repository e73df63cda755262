"""Continuous batching of `transformers`, generate_batch, at 16 and 64 samples of one prompt."""

import inspect

import torch
import transformers

from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import RECORDED_VOCAB
from bench.gpu.sections.outside import build
from bench.lib.common import traced

SAMPLES = (16, 64)


def run(section: Section) -> None:
    """Time the Llama shape with random weights, on which a step's time does not depend."""
    model = build(section)
    version = {"transformers": transformers.__version__}
    missing = refusal(model)
    if missing:
        section.add(note=missing, **version)
        return
    prompt, new = (1024, 128) if section.cuda else (32, 4)
    ids = torch.randint(RECORDED_VOCAB, (prompt,)).tolist()
    for samples in SAMPLES if section.cuda else (2,):
        if section.left <= 0:
            section.cut_off(f"N={samples}")
            continue
        try:
            section.add(
                N=samples,
                prompt=prompt,
                new_tokens=new,
                **version,
                **measured(section, model, ids, samples, new),
            )
        except Exception as error:
            # an error of another library is a result
            note = f"{type(error).__name__}: {error}"[:300]
            section.add(N=samples, note=note, traceback=traced(error), **version)


def refusal(model) -> str | None:
    """Reason why this version of `transformers` cannot run the section, or None."""
    if not hasattr(model, "generate_batch"):
        return "this version has no generate_batch"
    known = inspect.signature(model.generate_batch).parameters
    missing = [name for name in ("generation_config", "record_timestamps") if name not in known]
    return f"generate_batch of this version has no {', '.join(missing)}" if missing else None


def measured(section: Section, model, ids: list[int], samples: int, new: int) -> dict:
    """Seconds of a whole call, and tokens per second after the last sample's first token.

    The rate excludes the start, since each call captures its graphs again. Raises RuntimeError
    unless there are `samples` answers of `new` tokens.
    """
    config = transformers.GenerationConfig(
        max_new_tokens=new,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        eos_token_id=-1,
        pad_token_id=0,
    )
    how = {}
    if not section.cuda:
        # the default would take most of the memory
        how["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
            num_blocks=8, max_batch_tokens=64
        )
    outputs: dict = {}
    # copies of one prompt, whose pages may be shared
    seconds = section.clock(
        lambda: outputs.update(
            model.generate_batch(
                [ids] * samples, generation_config=config, record_timestamps=True, **how
            )
        )
    )
    lengths = [len(out.generated_tokens) for out in outputs.values()]
    if lengths != [new] * samples:
        raise RuntimeError(f"{samples} answers of {new} tokens were asked for, got {lengths}")
    times = [out.timestamps for out in outputs.values()]
    begun, ended = max(t[0] for t in times), max(t[-1] for t in times)
    later = sum(at > begun for t in times for at in t)
    return {"seconds": seconds, "tokens_per_second": later / (ended - begun)}
