"""Model type `csd` of lm-evaluation-harness, which draws repeated requests as one group.

    python -m csd.integrations.lm_eval run --model csd --model_args pretrained=FOLDER \
        --tasks gsm8k_cot_self_consistency

takes the arguments of `lm_eval`. In Python, importing this module registers the type.
"""

import logging
import time
from typing import Any

import torch

from csd.utils.lazy import pip_install

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
    raise ImportError(
        f"csd.integrations.lm_eval needs lm_eval: {pip_install('lm-eval')} ({error})"
    ) from error

from csd.engine.engine import Engine
from csd.engine.options import Options, SamplingOptions, read_options
from csd.engine.options.engine_arguments import EngineOptions
from csd.engine.options.params import SamplingParams, is_off, limited, resolve
from csd.engine.results.result import Sample
from csd.integrations.groups import draw
from csd.state.filters import FILTERS, GREEDY
from csd.traces.history import History
from csd.utils.arguments import checked, default_of

LOG = logging.getLogger("csd")


@register_model("csd")
class CSDLM(HFLM):
    """The harness's `hf` model type, except that `generate_until` draws with csd.

    pretrained and the other arguments: as in `hf`. seed: of the samples; drawn from torch's default
    generator, which the harness seeds, when None. max_slots, memory: as in `csd.Engine`; budget,
    speculate, prior: as in `csd.generate`. history: the file of a `csd.History`.

    A task may set the generation arguments until, max_gen_toks, do_sample and the filters of
    `csd.generate`; others raise ValueError unless they have no effect, as num_beams=1. A
    filter that neither the task nor the model's generation config sets is off.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        seed: int | None = None,
        max_slots: int = default_of(EngineOptions, "max_slots"),
        memory: float = default_of(EngineOptions, "memory"),
        budget: str | int = "auto",
        speculate: bool = True,
        history: str | None = None,
        prior: str | bool | None = None,
        **options: Any,
    ):
        running = dict(budget=budget, speculate=speculate, prior=prior)
        self.running = {name: checked(Options, name, value) for name, value in running.items()}
        self.seed = checked(Options, "seed", seed)
        super().__init__(pretrained, **options)
        self.history = None if history is None else History(path=history)
        model = self.accelerator.unwrap_model(self.model) if self._world_size > 1 else self.model
        self.csd = Engine(model, tokenizer=self.tokenizer, max_slots=max_slots, memory=memory)

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Returns one text per request, in order. Requests with equal arguments are one group."""
        members: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            context, request_options = request.args
            key = context, repr(sorted(request_options.items(), key=lambda item: item[0]))
            members.setdefault(key, []).append(i)
        prompts, stops = [], []
        for places in members.values():
            ids, params, until = self._parse(*requests[places[0]].args)
            prompts.append((ids, params, range(len(places))))
            stops.append(until)
        seed = int(torch.randint(2**63 - 1, ())) if self.seed is None else self.seed
        results = []
        if prompts:
            start = time.perf_counter()
            results = draw(self.csd, prompts, seed=seed, history=self.history, **self.running)
            _log([s for samples in results for s in samples], time.perf_counter() - start)

        texts: list[str] = [""] * len(requests)
        for places, samples, until in zip(members.values(), results, stops, strict=True):
            for i, sample in zip(places, samples, strict=True):
                text = self._answer(sample, until)
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
                texts[i] = text
        return texts

    def _answer(self, sample: Sample, until: list[str]) -> str:
        """The text behind the thought up to a stop string, as `hf` has it."""
        end, text = self.think_end_token, sample.text or ""
        if isinstance(end, int):
            # the last token is not the answer's if it ended the sample
            tokens = sample.tokens[: -1 if isinstance(sample.stop_reason, int) else None]
            if end in tokens:
                behind = tokens[::-1].index(end)
                text = self.tok_decode(tokens[len(tokens) - behind :])
            text, end = text.lstrip(), None
        return postprocess_generated_text(text, until, end)

    def _parse(self, context: str, kwargs: dict) -> tuple[list[int], SamplingParams, list[str]]:
        """Returns token ids, parameters and stop strings of a request."""
        options = normalize_gen_kwargs(kwargs, self.max_gen_toks)
        until = options.pop("until", None) or []
        until = [s for s in ([until] if isinstance(until, str) else until) if s]
        longest = options.pop("max_gen_toks")
        sample = options.pop("do_sample")
        for name in sorted(set(options) - set(FILTERS)):
            value = options.pop(name)
            if not is_off(name, value):
                raise ValueError(f"csd does not serve {name}={value!r} of the task")
        room = self.csd.config.context - longest
        if room < 1:
            raise ValueError(
                f"max_gen_toks={longest} fills the model's context of {self.csd.config.context}"
            )
        if not sample:
            options |= GREEDY
        # as in `hf`, a long context is truncated from the left
        ids = self.tok_encode(context, left_truncate_len=room)
        options |= dict(max_new_tokens=longest, stop=until, stop_token_ids=self.eot_token_id)
        config, read = self.csd.config, read_options(options, SamplingOptions)
        params = resolve(self.csd.generation_config, read, vocab=config.vocab)
        return ids, limited(params, config.context, len(ids)), until


def _log(samples: list[Sample], seconds: float) -> None:
    tokens, steps = sum(len(s.tokens) for s in samples), sum(len({*s.steps}) for s in samples)
    LOG.info(
        "csd drew %d samples: %d tokens in %.1f s, %.2f per step of a sample",
        len(samples),
        tokens,
        seconds,
        tokens / max(steps, 1),
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
