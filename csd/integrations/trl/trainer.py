"""GRPO whose trainer has the sampler's log-probabilities, bit for bit."""

import logging
import time
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer as StockTrainer

from csd.gradient.logprobs import flat_logprobs
from csd.gradient.policy import policy_of
from csd.integrations.trl.gguf import packed_weights, with_module
from csd.integrations.trl.rollout import Rollout, sampling_of
from csd.state.filters import CUTS

LOG = logging.getLogger("csd")


class GRPOTrainer(StockTrainer):
    """TRL's GRPOTrainer, with log-probabilities and entropies by `csd.logprobs`.

    The arguments are TRL's; `rollout_func` is by default a `Rollout`, whose engine is exact if the
    model can be and it does not state otherwise. All else is TRL's own, its loss included. A prompt
    is computed once for the completions of a micro-batch, as are their common prefixes. The
    log-probabilities are of the distribution that the completions are drawn from, with temperature,
    top-p and the other filters of `GRPOConfig`, in the dtype of the weights: `bf16=True` (autocast)
    does not apply to them. The reference policy of an adapter is its base model.
    `gradient_checkpointing` computes layers again in the backward.

    `model` may be a GGUF file. Its weights stay packed where csd multiplies them, and `peft_config`
    trains an adapter beside them, which is saved as any other; `model_init_kwargs` may have a dtype
    that they are unpacked to.

    The completions of a prompt stay in one micro-batch as far as it has room, in place of TRL's
    shuffle over the micro-batches of a generation.

    The trainer's log has, in addition to the rollout's:
    csd/logp_diff_max: largest absolute difference between a token's log-probability here and in its
        rollout, over the passes before the first update with the rollout's completions. It is 0.0
        if both are exact.
    csd/train_tokens_per_second: completion tokens per second of the training half, by this process.
    csd/rollout_seconds, csd/train_seconds: wall seconds of an optimiser step that draw completions,
        and those of the rest of its `training_step`s: rewards, forward and backward. A step whose
        completions were drawn before it has 0.0 of the first. Of this process; the optimiser's own
        seconds are in neither.
    csd/rows, csd/rows_without_sharing: rows of the passes with gradients, and rows of passes over
        each completion with its prompt.

    `tools` and `environment_factory` work with a `Rollout`: it draws every turn, and tokens of
    tools have no loss. Later turns read their text as a prompt, so `csd/logp_diff_max` is then up
    to rounding.

    Raises NotImplementedError for sharded weights, vLLM, images, a router's auxiliary loss,
    and `beta` with filters that remove tokens; ValueError for dropout.
    """

    # `Rollout` serves tools of trainers whose `_generate_single_turn` calls `next_turn`
    draws_later_turns = True

    def __init__(self, *args: Any, **kwargs: Any):
        if kwargs.get("rollout_func") is None:
            kwargs["rollout_func"] = Rollout()
        given = signature(StockTrainer.__init__).bind_partial(None, *args, **kwargs).arguments
        given.pop("self")
        super().__init__(**with_module(given))
        # packed weights are the same file's in each process, and cannot be sent
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self.model, packed_weights(self.model)
        )
        if self.aux_loss_enabled:
            raise NotImplementedError(
                "router_aux_loss_coef must be 0 for csd's GRPOTrainer, which computes no routers' "
                f"loss, got {self.router_aux_loss_coef}"
            )
        cut = {name: getattr(self.args, name, None) for name in CUTS}
        if self.beta and any(cut[name] not in (None, off) for name, off in CUTS.items()):
            raise NotImplementedError(
                "beta must be 0 with filters that drop tokens, since the divergence from a "
                f"reference that removes other tokens is infinite, got beta={self.beta} with {cut}"
            )
        policy = policy_of(self.accelerator.unwrap_model(self.model)).policy
        if policy.why is not None:
            LOG.warning("log-probabilities are not the sampler's bit for bit: %s", policy.why)
        elif isinstance(self.rollout_func, Rollout) and self.rollout_func.exact is None:
            self.rollout_func.exact = True
        # inputs of the micro-batch whose loss is computed
        self._inputs: dict[str, Any] = {}
        # the update that the buffered completions were drawn before
        self._drawn_at = -1
        # of the micro-batches of this update so far: of rollouts, of the rest
        self._seconds = [0.0, 0.0]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        if self._step % (steps * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            if "num_images" in batch:
                raise NotImplementedError("csd's GRPOTrainer trains on text only, got images")
            self._drawn_at = self.state.global_step
            self._buffered_inputs: Any = _in_turn(batch, steps)
        return self._buffered_inputs[self._step % steps]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        # log-probabilities that are computed now are of no micro-batch
        self._inputs = {}
        batch = super()._generate_and_score_completions(inputs)
        _without_removed(batch)
        return batch

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *args: Any, **more: Any
    ) -> Any:
        """Draw the turns after tools' answers as the first one, by the rollout."""
        if not isinstance(self.rollout_func, Rollout):
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, *args, **more
            )
        if images is not None or multimodal_fields:
            raise NotImplementedError("csd's GRPOTrainer trains on text only, got images")
        return self.rollout_func.next_turn(prompt_ids, self)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's training step; logs the seconds of the rollout and those after it."""
        before = self._rollout_seconds()
        start = time.perf_counter()
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        drawing = self._rollout_seconds() - before
        seconds = time.perf_counter() - start - drawing
        tokens = int(self._inputs["completion_mask"].sum())
        log = self._metrics["train"]
        log["csd/train_tokens_per_second"].append(tokens / max(seconds, 1e-9))
        self._seconds = [self._seconds[0] + drawing, self._seconds[1] + seconds]
        if self.accelerator.sync_gradients:
            log["csd/rollout_seconds"].append(self._seconds[0])
            log["csd/train_seconds"].append(self._seconds[1])
            self._seconds = [0.0, 0.0]
        return loss

    def _rollout_seconds(self) -> float:
        return float(getattr(self.rollout_func, "seconds", 0.0))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._inputs = inputs
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,  # [B, prompt + T], prompts padded on the left
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Log-probabilities and entropies [B, T], and no auxiliary loss."""
        if any(value is not None for value in images.values()):
            raise NotImplementedError("csd's GRPOTrainer trains on text only, got images")
        module, policy, chunk, *_ = policy_of(self.accelerator.unwrap_model(model))
        grad = torch.is_grad_enabled()
        width = input_ids.shape[1] - logits_to_keep
        params = sampling_of(self, policy.loaded.current_config(), width)
        prompts, completions, is_token = _split(input_ids, attention_mask, logits_to_keep)
        recompute = grad and self.args.gradient_checkpointing and policy.why is None
        rows: Any = None

        def run() -> tuple[torch.Tensor, ...]:
            nonlocal rows
            values, rows = flat_logprobs(
                module,
                policy,
                prompts,
                completions,
                params,
                chunk=chunk,
                entropy=compute_entropy,
                checkpoint=recompute,
            )
            return tuple(values[::2])

        values = _through(model, run)
        padded = [x.new_zeros(is_token.shape).masked_scatter(is_token, x) for x in values]
        if "tool_mask" in self._inputs:
            padded[0] = padded[0].masked_fill(self._inputs["tool_mask"] == 0, 0)
        if grad:
            log = self._metrics["train" if self.model.training else "eval"]
            log["csd/rows"].append(rows.count)
            log["csd/rows_without_sharing"].append(rows.unshared)
            self._log_difference(padded[0].detach())
        return padded[0], padded[1] if compute_entropy else None, None

    def _log_difference(self, logps: torch.Tensor) -> None:
        """Log the largest difference from the rollout, before the first update with its tokens."""
        inputs = self._inputs
        drawn = inputs.get("sampling_per_token_logps")
        if drawn is None or self.state.global_step != self._drawn_at:
            return
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        difference = ((logps - drawn).abs() * mask).max()
        largest = self.accelerator.gather(difference).max().item()
        self._metrics["train"]["csd/logp_diff_max"].append(largest)


def _in_turn(batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """`count` micro-batches of a batch, whose rows stay in their order."""
    size = len(batch["completion_ids"])
    each = size // count
    return [
        {
            name: value[i * each : (i + 1) * each]
            if torch.is_tensor(value) and value.dim() and len(value) == size
            else value
            for name, value in batch.items()
        }
        for i in range(count)
    ]


def _without_removed(batch: dict[str, Any]) -> None:
    """Set log-probabilities of tools' tokens to 0: filters may remove such a token, and TRL's
    loss multiplies them by a mask, with which -inf would be NaN."""
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if "tool_mask" in batch and batch.get(name) is not None:
            batch[name] = batch[name].masked_fill(batch["tool_mask"] == 0, 0)


def _split(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int
) -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
    """Prompts and completions without padding, and a mask [B, T] of the completions' tokens."""
    is_token = attention_mask[:, -width:].bool()
    # TRL masks a truncated completion out, and its row has no tokens then
    before = attention_mask[:, :-width].bool()
    ids, filled = input_ids.tolist(), is_token.any(1).tolist()
    prompts, completions = [], []
    for row, prompt, own, has in zip(ids, before.tolist(), is_token.tolist(), filled, strict=True):
        if has:
            first, last = row[:-width], row[-width:]
            prompts.append([t for t, p in zip(first, prompt, strict=True) if p])
            completions.append([t for t, p in zip(last, own, strict=True) if p])
    return prompts, completions, is_token


def _through(model: Any, run: Callable) -> Any:
    """`run()`; within the forward of DDP, which prepares its reduction of gradients there."""
    if not isinstance(model, DistributedDataParallel) or not torch.is_grad_enabled():
        return run()
    inner = model.module
    own = vars(inner).get("forward")

    def restore() -> None:
        if own is None:
            vars(inner).pop("forward", None)
        else:
            inner.forward = own

    def forward() -> Any:
        restore()
        return run()

    inner.forward = forward
    try:
        return model()
    finally:
        restore()
