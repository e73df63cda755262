"""Coverage of the kernels' loops, splits and chunks, derived from their arguments."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from csd.doctor.cases import CheckSizes
from csd.doctor.report import Check
from csd.kernels.attention.layout import Work
from csd.kernels.attention.prompt import Chunks
from csd.kernels.verify.constants import HEAD_WIDTH
from csd.kernels.verify.triton.launch import LIST, SCAN, SPLITS
from csd.state.kv_cache import PAGE
from csd.state.pool import model_row

# with this few programs per KV head, each program gets a run of several pages
FEW_PROGRAMS = 2


class Coverage:
    """Number of calls in which each part ran. kernels: True if the operations are Triton's.

    few_programs: True if attention is planned for FEW_PROGRAMS.
    """

    def __init__(self, sizes: CheckSizes, vocab: int, kernels: bool):
        self._sizes, self._vocab, self._kernels = sizes, vocab, kernels
        self._chunk = -(-vocab // SPLITS // SCAN) * SCAN
        self._calls: Counter[str] = Counter()
        self._planned = False  # True once a work list of splits was planned
        self.few_programs = False
        self.largest_logit = 0.0

    def watched(self, name: str, run: Callable) -> Callable:
        """Wrap the operation `name`, so that each call records the parts that ran."""
        note = getattr(self, f"_note_{name}")

        def call(*args: Any, **options: Any) -> Any:
            if name == "plan_attention" and self.few_programs:
                options["programs"] = FEW_PROGRAMS
            result = run(*args, **options)
            note(result, *args, **options)
            return result

        return call

    def checks(self) -> list[Check]:
        """Checks that the parts that these sizes should reach have run."""
        sizes, reach = self._sizes, {}
        reach["full pages of a prompt"] = sizes.prompt > PAGE
        # a step commits at most 17 tokens
        reach["full pages of a sample"] = sizes.tokens > PAGE + 17
        reach["runs of full pages"] = self._planned and sizes.prompt > 3 * PAGE
        reach["splits of a prompt"] = self._planned and sizes.prompt > 3 * PAGE
        reach["prefill chunks after the first"] = sizes.prompt - 1 > sizes.prefill_chunk
        reach["several chunks of logits"] = self._kernels and self._vocab > self._chunk
        reach["heads of several chunks"] = reach["several chunks of logits"]
        reach["several reads of a chunk"] = self._kernels and self._chunk > SCAN
        reach["heads too long to list"] = self._kernels and self._vocab > 8 * LIST
        reach[f"pools of {sizes.rows} rows"] = True
        reach["accepted drafts"] = sizes.tokens > PAGE
        names = [name for name, needed in reach.items() if needed]
        checks = [Check(f"reached: {name}", self._calls[name]) for name in names]
        for check in checks:
            if not check.calls:
                check.fail("never reached")
        return checks

    def _add(self, name: str, ran: bool) -> None:
        self._calls[name] += int(ran)

    def _note_plan_attention(self, work: Any, *_args: Any, **where: Any) -> None:
        prompts, samples = where["prompt_len"].tolist(), where["slot_len"].tolist()
        if not isinstance(work, Work):
            used = (where["group_start"].diff() > 0).tolist()
            of_prompts = [n // PAGE for n, u in zip(prompts, used, strict=True) if u]
            live = where["slot_nodes"].tolist()
            of_samples = [n // PAGE for n, u in zip(samples, live, strict=True) if u]
        else:
            self._planned = True
            of_prompts, of_samples = _full_pages(work, prompts, samples)
            self._add("runs of full pages", max(of_prompts, default=0) > 1)
            self._add("splits of a prompt", int(work.merge[:, 1].max()) > 1)
        self._add("full pages of a prompt", any(of_prompts))
        self._add("full pages of a sample", any(of_samples))

    def _note_verify(
        self, verdict: Any, logits: torch.Tensor, pool: Any, slots: Any, *_rest: Any
    ) -> None:
        vocab, chunk = self._vocab, self._chunk
        self._add(f"pools of {self._sizes.rows} rows", logits.shape[0] >= self._sizes.rows)
        self._add("accepted drafts", bool((verdict.accept_count > 1).any()))
        live = (pool.slot >= 0).nonzero()[:, 0]
        logits = logits[model_row(pool, live)].float()
        if not logits.numel():
            return
        self.largest_logit = max(self.largest_logit, float(logits.abs().max()))
        if not self._kernels:
            return
        width = HEAD_WIDTH * slots.temperature[pool.slot[live].long()].float()[:, None]
        near = logits >= logits.amax(1, keepdim=True) - width
        near = torch.nn.functional.pad(near, (0, -vocab % chunk))
        of_chunks = near.view(len(near), -1, chunk).sum(-1)
        self._add("several chunks of logits", of_chunks.shape[1] > 1)
        self._add("several reads of a chunk", min(vocab, chunk) > SCAN)
        self._add("heads of several chunks", bool(((of_chunks > 0).sum(1) > 1).any()))
        self._add("heads too long to list", bool((of_chunks.sum(1) > LIST).any()))

    def _note_prompt_attention(
        self, _result: Any, q: Any, k: Any, v: Any, chunks: Chunks, *_rest: Any
    ) -> None:
        self._add("prefill chunks after the first", any(chunks.starts))


def _full_pages(work: Work, prompts: list[int], samples: list[int]) -> tuple[list[int], list[int]]:
    """Numbers of full pages of each segment of a prompt, and of each segment of a sample."""
    segments, groups = work.segment.tolist(), len(prompts)
    full: tuple[list[int], list[int]] = [], []
    for first, last in work.program.tolist():
        for _, _, source, low, high, _ in segments[first:last]:
            tokens = prompts[source] if source < groups else samples[source - groups]
            full[source >= groups].append(max(0, min(tokens // PAGE, high) - low))
    return full
