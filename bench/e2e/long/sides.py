"""Sides that run in this process: csd with drafts and without, transformers, llama.cpp.

All draw with the same weights and settings, from the same prompt ids, up to the same end tokens.
`draw(ids, n, limit, seed)` returns a `Drawn`.
"""

import copy
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import GenerationConfig

import csd
from bench.e2e.cpu import module
from bench.e2e.long.drawn import Drawn
from bench.lib.settings import PLAIN, of_transformers


def ends_of(engine: csd.Engine) -> set[int]:
    """End tokens of the generation config and the tokenizer."""
    end_ids = engine.generation_config.eos_token_id
    ends = end_ids if isinstance(end_ids, list) else [end_ids]
    return {end for end in [*ends, engine.tokenizer.eos_token_id] if end is not None}


class Csd:
    """csd's engine, with drafts or without."""

    def __init__(self, engine: csd.Engine, speculate: bool, settings: dict[str, Any]):
        self.engine, self.speculate, self.settings = engine, speculate, settings

    def draw(self, ids: list[int], n: int, limit: int, seed: int) -> Drawn:
        return self.draw_all([ids], n, limit, seed)

    def draw_all(self, prompts: list[list[int]], n: int, limit: int, seed: int) -> Drawn:
        start = time.perf_counter()
        outs = csd.generate(
            self.engine,
            prompts,
            num_samples=n,
            max_new_tokens=limit,
            seed=seed,
            **self.settings,
            speculate=self.speculate,
        )
        seconds = time.perf_counter() - start
        return Drawn(
            [tokens for out in outs for tokens in out.tokens],
            [reason == "stop" for out in outs for reason in out.finish_reasons],
            seconds,
            mean(out.stats.tokens_per_step for out in outs),
        )


class Generate:
    """`generate` of transformers, with one batch of n rows."""

    def __init__(self, model: Any, ends: set[int], settings: dict[str, Any]):
        self.model, self.ends, self.settings = model, ends, settings

    def config(self, n: int, limit: int) -> GenerationConfig:
        ends = sorted(self.ends)
        return GenerationConfig(
            num_return_sequences=n,
            max_new_tokens=limit,
            do_sample=True,
            **of_transformers(self.settings),
            eos_token_id=ends,
            pad_token_id=ends[0],
        )

    def draw(self, ids: list[int], n: int, limit: int, seed: int) -> Drawn:
        torch.manual_seed(seed)
        prompt_ids = torch.tensor([ids])
        start = time.perf_counter()
        out = self.model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            generation_config=self.config(n, limit),
        )
        seconds = time.perf_counter() - start
        return Drawn.cut(out[:, len(ids) :].tolist(), self.ends, seconds)


class GenerateBatch(Generate):
    """`generate_batch` of transformers: continuous batching, with the prompt's pages shared."""

    def draw(self, ids: list[int], n: int, limit: int, seed: int) -> Drawn:
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = self.model.generate_batch([ids], generation_config=self.config(n, limit))
        seconds = time.perf_counter() - start
        token_lists = [list(x.generated_tokens) for x in out.values()]
        if len(token_lists) != n:
            raise RuntimeError(f"generate_batch drew {len(token_lists)} of {n} samples")
        return Drawn.cut(token_lists, self.ends, seconds)


class Llama:
    """llama.cpp on a GGUF file."""

    def __init__(
        self,
        path: str | Path,
        max_samples: int,
        cells: int,
        settings: dict[str, Any] = PLAIN,
    ):
        from bench.lib.llama_cpp import LlamaCpp

        self.lib = LlamaCpp(path, max_samples, cells, settings)

    def draw(self, ids: list[int], n: int, limit: int, seed: int) -> Drawn:
        start = time.perf_counter()
        tokens = self.lib.samples(ids, n, limit, seed)
        return Drawn(tokens, [self.lib.ends(s[-1]) for s in tokens], time.perf_counter() - start)


def transformers_sides(
    path: str, dtype: torch.dtype, ends: set[int], settings: dict[str, Any]
) -> dict[str, Any]:
    # separate modules with the same weights: generate_batch replaces the attention of its module
    one = module(path, dtype).eval()
    other = copy.deepcopy(one, {id(w): w for w in one.parameters()})
    return {
        "transformers generate": Generate(one, ends, settings),
        "transformers generate_batch": GenerateBatch(other, ends, settings),
    }
