"""Tokens per second and tau of a real checkpoint, if the machine has one, on recorded prompts.

Forced traces time only a shape; here the model's own answers determine how much is drafted.
"""

import json
from itertools import islice
from pathlib import Path

import torch
from huggingface_hub import CacheNotFound, scan_cache_dir

import csd
from bench.gpu.lib.section import Section
from bench.gpu.lib.timed import settled
from bench.lib.record import PROMPTS
from csd.models.fused.config import FAMILIES

SAMPLES = (16, 64, 1, 4)
# number of word problems, and most tokens of an answer
COUNT, NEW = 20, 256
# largest share of the device's memory for weights
SHARE = 0.6


def run(section: Section) -> None:
    """Add one row per number of samples: all prompts in turn, with drafts and without."""
    checkpoint = largest(section)
    if checkpoint is None:
        section.add(
            note="no checkpoint of csd's families in the Hugging Face cache",
            install="hf download Qwen/Qwen2.5-7B-Instruct",
        )
        return
    name, folder = checkpoint
    how = dict(device=section.device, self_check=False)
    with csd.Engine(str(folder), max_slots=max(SAMPLES), **how) as engine:
        for samples in SAMPLES:
            if section.left <= 0:
                section.cut_off(f"{name}, N={samples}")
                continue
            section.add(
                checkpoint=name,
                dtype=str(engine.dtype),
                N=samples,
                **measured(section, engine, samples),
            )


def largest(section: Section) -> tuple[str, Path] | None:
    """Name and folder of the largest model in the cache that csd runs and that fits the device.

    Does not use the network.
    """
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return None
    room = SHARE * torch.cuda.mem_get_info()[1] if section.cuda else 1e9
    fitting = []
    for repository in repositories:
        for revision in repository.revisions if repository.repo_type == "model" else ():
            if revision.size_on_disk <= room and is_whole(revision.snapshot_path):
                fitting.append((revision.size_on_disk, repository.repo_id, revision.snapshot_path))
    return max(fitting)[1:] if fitting else None


def is_whole(folder: Path) -> bool:
    """True if a snapshot is of a family that csd runs, with weights and a tokenizer."""
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    if not config.exists() or not (folder / "tokenizer.json").exists():
        return False
    if json.loads(config.read_text()).get("model_type") not in FAMILIES:
        return False
    parts = {"model.safetensors"}
    if index.exists():
        parts = set(json.loads(index.read_text())["weight_map"].values())
    return all((folder / part).exists() for part in parts)


def measured(section: Section, engine: csd.Engine, samples: int) -> dict:
    """Rates of calls with drafts and without, over as many prompts as fit the time."""
    with PROMPTS.open() as lines:
        texts = [json.loads(line)["prompt"] for line in islice(lines, COUNT)]
    chat = getattr(engine.tokenizer, "chat_template", None) is not None
    prompts = [[{"role": "user", "content": text}] if chat else text for text in texts]
    new = NEW if section.cuda else 8
    seconds, tokens, equal = {True: 0.0, False: 0.0}, {True: 0, False: 0}, 0
    steps = done = 0

    def draw(prompt, speculate: bool):
        """Seconds and result of a call; of a second call if the first captured graphs."""

        def once():
            outs = []
            took = section.clock(
                lambda: outs.append(
                    engine.generate(
                        prompt,
                        num_samples=samples,
                        max_new_tokens=new,
                        temperature=0.7,
                        seed=1,
                        speculate=speculate,
                    )
                )
            )
            return took, outs[0]

        return settled(engine, once)

    # warm-up: compile, measure and capture before the timing
    for speculate in (True, False):
        draw(prompts[0], speculate)
    # each number of samples gets an equal part of the remaining time
    until = section.left - section.left / (len(SAMPLES) - len(section.rows))
    for prompt in prompts:
        if done and section.left <= until:
            break
        drawn = {}
        for speculate in (done % 2 == 0, done % 2 == 1):
            took, drawn[speculate] = draw(prompt, speculate)
            seconds[speculate] += took
            tokens[speculate] += drawn[speculate].stats.tokens
        steps += drawn[True].stats.sample_steps
        equal += sum(a == b for a, b in zip(drawn[True].tokens, drawn[False].tokens, strict=True))
        done += 1
    return {
        "prompts": done,
        "tau": tokens[True] / steps,
        "tokens_per_second": tokens[True] / seconds[True],
        "plain_tokens_per_second": tokens[False] / seconds[False],
        "equal_samples": equal / (done * samples),
    }
