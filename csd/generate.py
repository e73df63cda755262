"""`csd.generate` and `csd.stream`: many samples of a prompt, the same ones plain sampling draws."""

from collections.abc import Iterator
from typing import Any, overload

import torch

from csd.call import Call
from csd.result import Sample, Samples

# what a type checker can tell apart; a tensor is one prompt or many
OnePrompt = str | list[int] | list[dict[str, str]] | list[dict[str, Any]]
ManyPrompts = list[str] | list[list[int]] | list[list[dict[str, str]]]


@overload
def generate(model: Any, prompt: OnePrompt, **options: Any) -> Samples: ...
@overload
def generate(model: Any, prompt: ManyPrompts, **options: Any) -> list[Samples]: ...
@overload
def generate(model: Any, prompt: torch.Tensor, **options: Any) -> Any: ...
def generate(model: Any, prompt: Any, **options: Any) -> Samples | list[Samples]:
    """Draw `num_samples` answers to each prompt.

    model: a `transformers` model, a local folder, a hub name, a GGUF file or a `csd.Engine`.
    prompt: a str (taken as it is), a list of message dicts (through the tokenizer's chat
        template), or token ids as a list or 1-D tensor. A list of these, or a 2-D tensor with
        `attention_mask`, gives a list of results. A prompt that occurs again continues the sample
        indices of its earlier occurrence.

    Drawing:
        num_samples: 1. first_sample: 0, the first sample's index.
        seed: None draws one from torch's default generator; the result says which.
        temperature (0 is greedy), top_k, top_p, min_p, repetition_penalty: as `transformers`
            defines them; left out, the model's generation config says, else they are off.
    Ending:
        max_new_tokens: 512, cut at the model's context when not given. min_new_tokens: 0.
        stop: strings that end a sample. stop_token_ids: more end tokens. ignore_eos: False.
        until: `csd.Vote(...)`, or a function of the samples of a prompt in the order of their
            indices: asked about the first, the first two, ... as soon as all of them have finished;
            True cancels the rest, so where it stops is the same for every draft and batch.
    Running:
        speculate: True.
        verifier: "match"; "canonical", "recursive" and "kseq" draw their drafts from the graph and
            accept or resample them (`csd.verify`). The law of the samples is the same, but they
            give up the invisibility of drafts: tokens then depend on siblings, batch and budget,
            and a seed repeats them only for the same call with a whole `budget`.
        drafter: "consensus"; for comparison also
            "prompt-lookup", "paper", "paper-tree", "recycling", "rest:PATH", "suffix".
        budget: "auto", or how many drafted tokens a step verifies over all samples.
        tokenizer, device, dtype, revision, chat_template_kwargs.
    Watching:
        progress: True shows a line while running. callback(prompt, sample, new_tokens, text) gets
            each sample's new tokens once per step. record: path of a trace file to write.
            drafts: True keeps what each step drafted in `out[i].drafts`.

    Returns `Samples` (a list of them for a list of prompts). Ctrl-C returns what there is; samples
    that had not finished say `cancelled`.

    Raises ValueError or TypeError for arguments that cannot be served, naming the argument.
    """
    call = Call(model, prompt, options)
    try:
        for _ in call.run():
            pass
    except KeyboardInterrupt:
        pass
    results = call.results()
    return results if call.many else results[0]


def stream(model: Any, prompt: Any, **options: Any) -> Iterator[tuple[int, Sample]]:
    """As `generate`, but yields (prompt index, Sample) as each sample finishes.

    Closing the iterator cancels the rest and leaves the engine usable. With `until`, samples may
    have been yielded beyond those that decided; `generate` calls them cancelled.
    """
    call = Call(model, prompt, options)
    return call.run()
