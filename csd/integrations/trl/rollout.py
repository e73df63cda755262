"""GRPO rollouts for TRL, drawn by csd."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from csd.engine.engine import Engine
from csd.engine.generate import engine_for
from csd.engine.options import Options, SamplingOptions, read_options
from csd.engine.options.params import SamplingParams, config_ends, limited, resolve
from csd.engine.results.result import Sample
from csd.graph.prior import MOST_HALVINGS, Prior
from csd.integrations.groups import draw, draw_rows, earlier_copies
from csd.integrations.trl.early import EarlyEnds
from csd.kernels.common.noise import prompt_key
from csd.models.fused.config import ModelSizes
from csd.state.filters import GREEDY
from csd.traces.history import History
from csd.utils.arguments import check_flag, check_whole, checked
from csd.utils.check import shown
from csd.utils.lazy import check_installed


@dataclass(slots=True)
class BatchTurns:
    """The samples of one batch of a process, over its turns: tools add their answers between them.

    A sample is a branch of a session (`csd.engine.session`) that starts with its prompt: a turn is
    sampled with the noise of (seed, text so far) and with the sample's index, and the samples of
    one prompt draft for each other. TRL passes the texts that go on, without their rows; a text
    begins with that of its row at the end of the last turn.
    """

    seed: int
    prompts: list[list[int]]  # of each row
    indices: list[int]  # sample index of each row
    texts: list[list[int]]  # prompt and completion of each row so far
    graphs: dict[tuple[int, ...], object] = field(default_factory=dict)  # of each prompt

    def draw(
        self,
        engine: Engine,
        texts: list[list[int]],
        params: SamplingParams,
        length: int,
        **running: Any,
    ) -> list[Sample]:
        """Draw one turn of each text.

        texts: in the order of their rows. length: limit of a row's tokens after its prompt; a text
        without room for a token gets one, which TRL cuts off. running: as in
        `csd.integrations.groups.draw`.
        """
        rows = self._rows_of(texts)
        requests, graphs = [], []
        for i, text in zip(rows, texts, strict=True):
            room = max(1, length - (len(text) - len(self.prompts[i])))
            limited = params.replace(max_new_tokens=min(params.max_new_tokens, room))
            requests.append((text, limited, range(self.indices[i], self.indices[i] + 1)))
            graphs.append(self.graphs.setdefault(tuple(self.prompts[i]), object()))
        drawn = draw(engine, requests, seed=self.seed, graphs=graphs, **running)
        samples = [of_text[0] for of_text in drawn]
        for i, text, sample in zip(rows, texts, samples, strict=True):
            self.texts[i] = [*text, *sample.tokens]
        return samples

    def _rows_of(self, texts: list[list[int]]) -> list[int]:
        rows: list[int] = []
        for text in texts:
            row = rows[-1] + 1 if rows else 0
            while row < len(self.texts) and self.texts[row] != text[: len(self.texts[row])]:
                row += 1
            if row == len(self.texts):
                raise RuntimeError(
                    "the trainer's texts must continue those of its rollout, in their order, got "
                    f"one of {len(text)} tokens that continues none"
                )
            rows.append(row)
        return rows


class Rollout:
    """Draws a trainer's completions with csd; one object serves one trainer.

    The copies of a prompt in a call are one group. If they are spread over several processes, each
    process takes its own sample indices, so the samples do not depend on the number of processes.
    The seed is derived from `args.seed`, the trainer's step and the call within it, so calls
    differ, and a resumed run draws what the uninterrupted run would. csd reads the trainer's own
    weights in their dtype, updated after each optimiser step; peft adapters are applied unmerged.

    exact: as in `csd.Engine`; None for its default, and in csd's `GRPOTrainer` for True.
    budget, speculate, prior: as in `csd.generate`; a call is the rows that a process draws at once.
        prior=True learns over all calls, and halves its weights in each epoch, so that the
        influence of tokens that the policy has stopped sampling decays.
        history: number of epochs whose completions of a prompt draft for its later ones, on any
        process; 0 turns it off. It does not change completions and losses. Evaluation neither uses
        nor extends it.

    max_thinking_tokens, thinking_tags: as in `csd.generate`; forced tokens have no loss.
    until: "all_correct" ends a group after its first samples if all of them have the full reward,
        since its advantage is then 0. Other samples get a loss mask of 0 and a reward of NaN.
    first: number of these first samples, half of `num_generations` by default. full_reward: the
        weighted sum of the largest rewards. audit: share of the groups that could end early but are
        drawn completely, to count those with a sample below the full reward (`ends.mixed` of
        `ends.audited`).

    tokens, sample_steps: of the last turn; their ratio is tau. seconds: of all calls. The trainer's
        log has csd/tau and csd/tokens_per_second of its first process. `ends.sizes`, with `until`:
        the number of samples drawn of each group in the last call.

    Sampling follows `GRPOConfig`: its filters, `max_completion_length` and `generation_kwargs`, as
    far as csd implements them.
    """

    def __init__(
        self,
        *,
        exact: bool | None = None,
        budget: str | int = "auto",
        speculate: bool = True,
        history: int = 0,
        prior: Prior | str | bool | None = None,
        max_thinking_tokens: int | None = None,
        thinking_tags: Any = None,
        until: str | None = None,
        first: int | None = None,
        full_reward: float = 1.0,
        audit: float = 0.05,
    ):
        running: dict[str, Any] = dict(budget=budget, speculate=speculate, prior=prior)
        self.running = {name: checked(Options, name, value) for name, value in running.items()}
        self.prior: Prior | None = self.running["prior"]
        self._decays, self._epoch = prior is True, 0
        thought = dict(max_thinking_tokens=max_thinking_tokens, thinking_tags=thinking_tags)
        self.thought = {name: checked(Options, name, value) for name, value in thought.items()}
        self.history: History | None = None
        if check_whole("history", history, 0):
            # no limit on an epoch's samples
            self.history = History(samples=1 << 20, epochs=history)
        check_installed("trl", "trl", "csd.integrations.trl.Rollout")
        self.ends: EarlyEnds | None = None
        if until is not None:
            if until != "all_correct":
                raise ValueError(f"until must be None or 'all_correct', got {shown(until)}")
            self.ends = EarlyEnds(first, full_reward, audit)
        self.exact = None if exact is None else check_flag("exact", exact)
        self.tokens = self.sample_steps = 0
        self.seconds = 0.0
        self._turns: BatchTurns | None = None
        self._step: tuple | None = None
        self._calls = 0

    def __call__(self, prompts: list, trainer: Any) -> dict[str, list]:
        """Draw a completion for each of `prompts`, copies included, as TRL's `rollout_func`.

        Returns lists with one entry per prompt: `prompt_ids`, `completion_ids` with the end token,
        and `logprobs` of the completion's tokens in the distribution they were drawn from; with
        `until` or `max_thinking_tokens` also `env_mask`, which is 0 for tokens without loss.

        Raises NotImplementedError for sharded weights, vLLM and images, with which csd does not
        work, for tools of TRL's own trainer, and for tools with `until` or `max_thinking_tokens`.
        """
        model = _model_of(trainer)
        self._check_tools(trainer)
        rows, images, fields = trainer._tokenize_prompts(prompts)
        if images is not None or fields:
            raise NotImplementedError(f"csd samples text only, got images or {sorted(fields)}")
        rows = [list(row) for row in rows]
        engine = engine_for(model, exact=self.exact)
        tokenizer = tokenizer_of(trainer)
        history = self.history if trainer.model.training else None
        self._decay_prior(trainer)
        # lengths are the same for all rows
        longest = max(range(len(rows)), key=lambda i: len(rows[i]))
        params = sampling_of(
            trainer,
            engine.config,
            prompt_tokens=len(rows[longest]),
            name=f"prompt {longest}",
            **self.thought,
        )
        seed, indices = self._seed(trainer), _indices(rows, trainer.accelerator)

        def draw(places: list[int], known: list[list[Sample]] | None = None) -> list[Sample]:
            return draw_rows(
                engine,
                [rows[i] for i in places],
                params,
                seed=seed,
                first_sample=[indices[i] for i in places],
                **self.running,
                history=history,
                keep=False,
                known=known,
            )

        drawn: list[Sample | None]
        start = time.perf_counter()
        if self.ends is None or not trainer.model.training:
            drawn = [*draw([*range(len(rows))])]
        else:
            drawn = self.ends.draw(trainer, prompts, rows, seed, draw)
        self._count(trainer, [s for s in drawn if s is not None], time.perf_counter() - start)
        if trainer.tools:
            texts = [[*row, *s.tokens] for row, s in zip(rows, drawn, strict=True) if s]
            self._turns = BatchTurns(seed, rows, indices, texts)
        if history is not None:
            _add_everywhere(history, rows, drawn)
        # one padding token without loss stands for a sample that was not drawn
        output = {
            "prompt_ids": rows,
            "completion_ids": [s.tokens if s else [tokenizer.pad_token_id] for s in drawn],
            "logprobs": [s.logprobs if s else [0.0] for s in drawn],
        }
        if self.ends is not None or self.thought["max_thinking_tokens"] is not None:
            # tokens that the model did not choose have no loss
            output["env_mask"] = [
                [int(not f) for f in s.forced or [False] * len(s.tokens)] if s else [0]
                for s in drawn
            ]
        return output

    def next_turn(
        self, texts: list[list[int]], trainer: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draw one turn of samples of the last call, whose tools have answered.

        texts: token ids of prompt, completion and answers so far, in the order of the samples.
        Returns the turn's token ids and their log-probabilities.
        """
        if self._turns is None:
            raise RuntimeError("next_turn needs a first turn by this rollout")
        engine = engine_for(_model_of(trainer), exact=self.exact)
        params = sampling_of(trainer, engine.config, max(map(len, texts)), **self.thought)
        start = time.perf_counter()
        length = trainer.max_completion_length
        drawn = self._turns.draw(engine, texts, params, length, **self.running)
        self._count(trainer, drawn, time.perf_counter() - start)
        return [s.tokens for s in drawn], [s.logprobs for s in drawn]

    def _count(self, trainer: Any, samples: list[Sample], seconds: float) -> None:
        self.tokens = sum(len(s.tokens) for s in samples)
        self.sample_steps = sum(len(set(s.steps)) for s in samples)
        self.seconds += seconds
        log = trainer._metrics["train" if trainer.model.training else "eval"]
        log["csd/tau"].append(self.tokens / max(self.sample_steps, 1))
        log["csd/tokens_per_second"].append(self.tokens / max(seconds, 1e-9))

    def _check_tools(self, trainer: Any) -> None:
        if not trainer.tools:
            return
        if not getattr(trainer, "draws_later_turns", False):
            raise NotImplementedError(
                "tools need csd.integrations.trl.GRPOTrainer, got "
                f"{type(trainer).__name__}: TRL's own trainer draws the turns after a tool's "
                "answer by itself, without log-probabilities"
            )
        if self.ends is not None or self.thought["max_thinking_tokens"] is not None:
            raise NotImplementedError(
                "until and max_thinking_tokens must be None with tools, since TRL then computes "
                "the loss mask without the rollout's"
            )

    def _decay_prior(self, trainer: Any) -> None:
        """Halve the weights of the rollout's own prior for each epoch that has begun since."""
        epoch = int(trainer.state.epoch or 0)
        if self._decays and self.prior is not None and epoch > self._epoch:
            self.prior.decay(min(epoch - self._epoch, MOST_HALVINGS))
        self._epoch = epoch

    def _seed(self, trainer: Any) -> int:
        """Seed of a call: equal on all processes, new in each call, unaffected by evaluations."""
        step = (trainer.state.global_step, int(trainer.model.training))
        self._calls = self._calls + 1 if step == self._step else 0
        self._step = step
        return prompt_key(trainer.args.seed, [*step, self._calls])


def tokenizer_of(trainer: Any) -> Any:
    """The trainer's tokenizer, which a processor has as its attribute."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def sampling_of(
    trainer: Any, model: ModelSizes, prompt_tokens: int, name: str = "the prompt", **more: Any
) -> SamplingParams:
    """Sampling parameters of a trainer's completions; more: other arguments of `generate`."""
    config = trainer.generation_config
    arguments = more | dict(
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        end_token_ids=config_ends(config, model.vocab),
    )
    options = read_options(arguments | ({} if config.do_sample else GREEDY), SamplingOptions)
    params = resolve(config, options, vocab=model.vocab, tokenizer=tokenizer_of(trainer))
    return limited(params, model.context, prompt_tokens, name)


def _indices(rows: list[list[int]], accelerator: Any) -> list[int]:
    """Sample index of each row; copies of its prompt on lower ranks come first."""
    from accelerate.utils import gather_object

    everywhere = gather_object([Counter(map(tuple, rows))])
    before: Counter = Counter()
    for counts in everywhere[: accelerator.process_index]:
        before.update(counts)
    return [before[tuple(row)] + i for row, i in zip(rows, earlier_copies(rows), strict=True)]


def _add_everywhere(history: History, rows: list[list[int]], drawn: list[Sample | None]) -> None:
    """Add all processes' samples to the history, by sample index: prompts may change processes."""
    from accelerate.utils import gather_object

    groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    here = [(tuple(row), s.index, s.tokens) for row, s in zip(rows, drawn, strict=True) if s]
    for row, index, tokens in gather_object(here):
        groups.setdefault(tuple(row), []).append((index, tokens))
    for row, samples in groups.items():
        history.add(row, [tokens for _, tokens in sorted(samples)])


def _model_of(trainer: Any) -> torch.nn.Module:
    """The trainer's model without wrappers, whose parameters the optimiser updates."""
    if getattr(trainer, "use_vllm", False):
        raise NotImplementedError("use_vllm must be False, since csd replaces vLLM, got True")
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise NotImplementedError("DeepSpeed ZeRO-3 shards the weights; use ZeRO-2 or less, or DDP")
    return model
