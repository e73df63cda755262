"""Runs of `csd doctor`: engines that draw the same samples in different ways.

`UncapturedEngine` runs steps of fixed shape without CUDA graphs.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from csd.doctor.cases import CASES, NODES, SLOTS, SMALL, CheckSizes, run_properties, run_states
from csd.doctor.compare import ROUNDINGS, compared, compared_ops, differences, rows_for
from csd.doctor.coverage import Coverage
from csd.doctor.report import (
    Check,
    Report,
    check_machine,
    described,
    device_name,
    instance_note,
    versions,
)
from csd.engine.call import RunSettings
from csd.engine.engine import Engine
from csd.engine.requests.request import Request
from csd.engine.resources.caches import Caches
from csd.engine.step.static_step import Captures, StaticStep
from csd.engine.step.step import Step
from csd.graph.consensus import ConsensusGraph
from csd.graph.teacher_forcing import TeacherForcing
from csd.kernels.backends import choose
from csd.kernels.ops import Ops, reference
from csd.models.demo import random_decoder
from csd.models.fused.config import ModelConfig
from csd.models.fused.fuse import pack
from csd.state.context_table import GraphConfig

# contexts of the graph, a few of which are dropped for the samples' last ones
CONTEXTS = 1 << 13


class _Uncaptured(Captures):
    """In place of a replay a step runs again, and is copied into the first one's snapshot."""

    def get(self, key: Any, run: Callable[[], Any]) -> Any:
        if key not in self.graphs:
            first, *rest = run()

            def replay() -> None:
                snapshot = run()[0]
                first.ints.copy_(snapshot.ints)
                first.floats.copy_(snapshot.floats)

            self.graphs[key] = SimpleNamespace(replay=replay), (first, *rest)
        return self.graphs[key]


class _UncapturedCaches(Caches):
    def allocate(self, *args: Any, **options: Any) -> Step:
        step = super().allocate(*args, **options)
        if isinstance(step, StaticStep):
            step.captures = _Uncaptured()
        return step


class UncapturedEngine(Engine):
    """Engine without captures, whose products have as many rows as those of captured steps."""

    def _make_caches(self, **sizes: Any) -> Caches:
        return _UncapturedCaches(self.model, **sizes)


def check(
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    config: ModelConfig = SMALL,
    kernels: str | None = None,
    exact: bool = False,
    sizes: CheckSizes | None = None,
) -> Report:
    """Check the operations at the head sizes, the vocabulary and with the extras of `config`.

    kernels, exact: as in `Engine`. sizes: of the prompts, samples and pools.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    start = time.perf_counter()
    config = replace(config, layers=2, context=1024)
    ops = choose(kernels, device, dtype)
    on_gpu = device.type == "cuda"
    report = Report(
        device_name(device), str(dtype).removeprefix("torch."), ops.name, versions(device)
    )
    if on_gpu and ops.launches:
        report.checks += check_machine()
        report.notes += filter(None, [instance_note(device)])
    if not report.failed:
        runs = _Runs(config, device, dtype, kernels, exact, sizes or CheckSizes(), ops)
        runs.compare_operations(report)
        if not report.failed:
            runs.compare_tokens(report)
    report.seconds = time.perf_counter() - start
    return report


class _Runs:
    """Engines that draw the same samples in different ways."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kernels: str | None,
        exact: bool,
        sizes: CheckSizes,
        ops: Ops,
    ):
        self._config, self._device, self._dtype, self._sizes = config, device, dtype, sizes
        self._options: dict[str, Any] = dict(
            kernels=kernels,
            exact=exact or None,
            self_check=False,
            max_slots=SLOTS,
            prefill_chunk=sizes.prefill_chunk,
            # each comparison copies the caches: no pages but those of the check's own samples
            prefix_cache=0.0,
        )
        self._is_exact = exact
        self._ops = ops
        self._coverage = Coverage(sizes, config.vocab, ops.launches)
        self._want: list[Request] = []  # drawn by steps whose pools are not padded

    def compare_operations(self, report: Report) -> None:
        """Compare each operation with its reference, and count the loops that ran."""
        checks = rows_for(self._ops)
        try:
            with self._engine(static=False) as e:
                e.ops = compared_ops(e.ops, checks, self._coverage)
                # a step without drafts makes its pool with a different operation
                self._run(e, self._sizes.filtered(self._config.vocab), 0, drafted=False)
                self._want = self._draw(e)
                force(e, self._want, self._sizes.requests(self._config.vocab))
            with self._engine(static=self._statically(), captured=False) as e:
                self._run_properties(e.ops, checks)
                self._coverage.few_programs = e.ops.launches and not e.exact
                e.ops = compared_ops(e.ops, checks, self._coverage)
                nodes = self._sizes.rows - SLOTS
                self._run(e, self._sizes.wide(self._config.vocab), nodes)
                run_states(e.ops, self._device, self._dtype)
        except Exception as error:
            # an operation that raised has recorded the error in its check
            if all(row.error is None for row in checks.values()):
                report.checks.append(Check("step", calls=1, error=described(error)))
        # the fused forward pass runs only where products are loops
        report.checks += [row for row in checks.values() if row.calls or row.name != "forward"]
        if not report.failed:
            report.checks += self._coverage.checks()

    def _run_properties(self, ops: Ops, checks: dict[str, Check]) -> None:
        plain, attention = reference().tree_attention, {}
        for name in CASES:
            row = Check(f"tree_attention with {name}")
            checks[row.name] = row
            attention[name] = compared(ops.tree_attention, plain, row)
        run_properties(ops, self._config, self._device, self._dtype, attention)

    def compare_tokens(self, report: Report) -> None:
        """Compare tokens of different kinds of steps, which must be equal."""
        on_gpu = self._device.type == "cuda"
        # below float32, passes of other sizes sum in other orders, whose bits decide some tokens
        any_rows = self._dtype == torch.float32 or self._is_exact
        if self._statically():
            name = "captured steps" if on_gpu else "steps of fixed shape"
            if any_rows:
                self._compare(report, name, self._want, static=True)
            elif on_gpu:
                with self._engine(static=True, captured=False) as e:
                    want = self._draw(e)
                self._compare(report, name, want, static=True)
        if any_rows:
            self._compare(
                report, "drafted against plain tokens", self._want, static=False, drafted=False
            )

    def _compare(
        self, report: Report, name: str, want: list[Request], static: bool, drafted: bool = True
    ) -> None:
        row = Check(name, calls=1)
        report.checks.append(row)
        try:
            with self._engine(static) as e:
                got = self._draw(e, drafted=drafted)
        except Exception as error:
            row.fail(error)
            return
        finally:
            row.show()
        temperatures = {request.index: request.params.temperature for request in want}
        rounding = ROUNDINGS * torch.finfo(self._dtype).eps * self._coverage.largest_logit
        for difference in differences(want, got):
            allowed = 0.0 if self._is_exact else rounding / temperatures[difference.prompt]
            if not difference.gap <= allowed:
                row.fail(f"other tokens were committed: {difference}")
                return
            report.notes.append(
                f"{name}: a tie of two tokens decided {difference}: their scores "
                f"differ by {difference.gap:.1e}, and rounding may account for "
                f"{allowed:.1e}"
            )

    def _statically(self) -> bool:
        """True if steps of fixed shape can run: on a GPU not with operations that read it."""
        return self._device.type == "cpu" or not self._ops.reads_device

    def _engine(self, static: bool, captured: bool = True) -> Engine:
        decoder = random_decoder(self._config, self._device, self._dtype)
        # as for a checkpoint's decoder
        pack(decoder)
        kind = Engine if captured else UncapturedEngine
        return kind(decoder, static=static, **self._options)

    def _draw(self, e: Engine, drafted: bool = True) -> list[Request]:
        return self._run(e, self._sizes.requests(self._config.vocab), NODES, drafted)

    def _run(
        self, e: Engine, requests: list[Request], nodes: int, drafted: bool = True
    ) -> list[Request]:
        settings = RunSettings(budget=nodes, speculate=drafted, drafter=small_graph)
        for _ in e.run(requests, settings):
            pass
        return requests


def small_graph(ops: Ops, device: str | torch.device) -> ConsensusGraph:
    """A graph of the check's own size: each comparison copies its table."""
    return ConsensusGraph(ops, device, GraphConfig(capacity=CONTEXTS))


def force(engine: Engine, drawn: list[Request], requests: list[Request]) -> None:
    """Run steps of `requests` that commit the tokens of the same requests that are drawn."""
    results = [request.result() for request in drawn]
    tokens = {
        (request.key, sample.index): list(sample.tokens)
        for request, result in zip(drawn, results, strict=True)
        for sample in result
    }
    settings = RunSettings(
        budget=0,
        speculate=False,
        drafter=small_graph,
        forcing=lambda ops, rows: TeacherForcing(tokens, ops, rows),
    )
    for _ in engine.run(requests, settings):
        pass
