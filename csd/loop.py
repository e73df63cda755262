"""One call of an engine: admits groups, keeps the slots filled, runs steps, hands out samples."""

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from csd.budget import FixedBudget, FixedPool
from csd.cache import pages_for
from csd.job import Job, OnTokens, Running, Until
from csd.pool import PACE
from csd.prefill import Prefill
from csd.record import Pending, Record, Snapshot
from csd.result import Sample
from csd.slots_host import Placed, clear_slot, fill_slots
from csd.verdict import LENGTH, STOP

if TYPE_CHECKING:
    from csd.engine import Engine

# what a step that is not static is timed by
PHASES = ("propose", "forward", "verify", "commit", "insert")
REASONS = {STOP: "stop", LENGTH: "length"}


class Loop:
    """One call: admits groups, refills slots, runs steps and hands out what finished."""

    def __init__(
        self,
        engine: "Engine",
        step: Any,  # csd.step.Step, a StaticStep where the budget is a FixedPool
        jobs: list[Job],
        until: Until | None,
        on_tokens: OnTokens | None,
        record_top: bool,
        drafts: bool,
    ):
        self.engine, self.step = engine, step
        self.queue = deque(jobs)
        self.active: list[Job] = []
        self.owners: list[Running | None] = [None] * step.slots.count
        self.until, self.on_tokens = until, on_tokens
        self.record_top, self.drafts = record_top, drafts
        self.steps = 0
        self.prefill: Prefill | None = None  # the prompt that is being read
        self.read_tokens = 0  # of prompts, since the last step
        self.paced = False  # whether samples that are behind get more nodes

    def run(self, budget: FixedBudget | FixedPool) -> Iterator[tuple[Job, Sample]]:
        records: deque[Pending] = deque()
        static = isinstance(budget, FixedPool)
        phases = ("step",) if static else PHASES
        self.step.seconds = dict.fromkeys(("prefill", *phases), 0.0)
        while True:
            self.refill()
            live = sum(r is not None for r in self.owners)
            if not live:
                return
            # a static step does not ask the device which slots are live
            running = live if static else int(self.step.slots.live.sum())
            if running and isinstance(budget, FixedPool):
                records.append(self.launch(running, budget))
            elif running and isinstance(budget, FixedBudget):
                records.append(self.one_step(running, budget))
            # with no slot live on the device the host only has to catch up
            while records and (len(records) > self.engine.lag or not running):
                start = time.perf_counter()
                record = records.popleft().read()
                if static:
                    self.step.seconds["step"] += time.perf_counter() - start
                budget.learn(sum(n > 0 for n in record.nodes), record)
                yield from self.read(record)

    def launch(self, live: int, budget: FixedPool) -> Pending:
        """A static step; how many rows it has depends on records that are in already."""
        self.steps += 1
        start = time.perf_counter()
        # where others wait, a slot that ends early is of use
        last = not (self.queue or self.prefill or any(job.waiting for job in self.active))
        if last != self.paced:
            self.paced = last
            self.step.slots.pace.fill_(PACE if last else 0)
        pending = self.step.launch(*budget.ask(live), self.owners, self.steps)
        self.step.seconds["step"] += time.perf_counter() - start
        return pending

    def one_step(self, live: int, budget: FixedBudget) -> Pending:
        self.steps += 1
        spent = self.step.seconds
        before = dict(spent)
        pool, verdict = self.step(live, budget)
        took = {phase: spent[phase] - before[phase] for phase in PHASES}
        snapshot = Snapshot(
            pool, verdict, self.record_top, self.drafts, self.step.ops.snapshot
        )
        pending = Pending.of(snapshot, self.owners, self.steps)
        pending.draft_seconds = took["propose"] + took["insert"]
        pending.model_seconds = took["forward"] + took["verify"] + took["commit"]
        return pending

    def refill(self) -> None:
        """Fill free slots, all of them in one copy to the device."""
        self.read_tokens = 0
        placed = []
        for s, owner in enumerate(self.owners):
            if owner is not None:
                continue
            job = self.next_job()
            if job is None:
                break
            placed.append(self.place(job, s))
        fill_slots(self.step.slots, self.step.cache.slot_pages, placed)

    def next_job(self) -> Job | None:
        """Whose next sample gets a free slot; None while its prompt is being read, or none waits.

        While other prompts wait, only so many samples of one are in flight together, by default a
        quarter of them: those that come later draft from finished ones.
        """
        waiting = [job for job in self.active if job.waiting]
        for job in waiting:
            together = self.engine.together or -(-len(job.samples) // 4)
            if len(job.running) < together:
                return job
        if self.queue or self.prefill:
            return self.admit()
        return waiting[0] if waiting else None

    def place(self, job: Job, s: int) -> Placed:
        """The job's next sample gets slot s and its pages."""
        index = job.waiting.popleft()
        pages = self.step.cache.allocator.take(pages_for(job.params.max_new_tokens))
        running = Running(job, index, pages, self.engine.tokenizer)
        job.running[index] = self.owners[s] = running
        return Placed(s, job, index, pages)

    def admit(self) -> Job | None:
        """The next job once its prompt is read; None while it is not, and when none is left.

        Between two steps no more than a chunk's tokens are read, of one prompt or of several short
        ones, so no step waits for more. Before the first step none waits: it has its slots filled.
        """
        if self.prefill is None:
            if not self.queue:
                return None
            taken = {j.group for j in self.active}
            group = next(g for g in range(len(self.owners)) if g not in taken)
            self.prefill = Prefill.begin(self.engine, self.step, self.queue.popleft(), group)
        start = time.perf_counter()
        while chunk := self.prefill.chunk:
            fits = self.read_tokens + chunk <= self.engine.prefill_chunk
            if not fits and self.steps and any(self.owners):
                break
            self.prefill.read()
            self.read_tokens += chunk
        else:
            self.prefill.end()
            self.active.append(self.prefill.job)
            self.prefill = None
        self.step.seconds["prefill"] += time.perf_counter() - start
        return None if self.prefill else self.active[-1]

    def read(self, record: Record) -> Iterator[tuple[Job, Sample]]:
        """Take a step's tokens to their samples; yields the samples that finished."""
        seen = set()
        for s, running in enumerate(record.owners):
            if running is None or running.done or not record.nodes[s]:
                continue
            if record.bad[s]:
                raise FloatingPointError(
                    f"the model gave NaN or infinite logits at step {record.step}, slot {s} "
                    f"(prompt {running.job.index}, sample {running.index})"
                )
            job = running.job
            had = len(running.tokens)
            self.take(running, record, s)
            stats = job.stats
            new = len(running.tokens) - had
            stats.tokens += new
            stats.sample_steps += 1
            stats.steps += job.index not in seen
            seen.add(job.index)
            stats.nodes_proposed += record.nodes[s] - 1
            for source in running.sources[had:]:
                if source:
                    stats.accepted[source] += 1
                    stats.nodes_accepted += 1
            reason = "stop" if running.stopped else REASONS.get(record.finish[s])
            if reason:
                sample = running.sample(reason)
                self.free(s, running)
                job.finished[running.index] = sample
                job.top[running.index] = running.top
                stats.seconds = dict(self.step.seconds)
                yield job, sample
                yield from self.decide(job)

    def take(self, running: Running, record: Record, s: int) -> None:
        n = record.count[s]
        had = len(running.tokens)
        text = running.append(
            record.tokens[s][:n],
            record.logprobs[s][:n],
            record.raw_logprobs[s][:n],
            record.sources[s][:n],
            self.on_tokens is not None,
        )
        new = running.tokens[had:]
        running.steps += [record.step] * len(new)
        if record.trees is not None:
            running.drafts.append(record.trees.draft(s, record.step, had))
        if record.top is not None:
            running.top += zip(record.top[0][s][: len(new)], record.top[1][s], strict=False)
        if self.on_tokens is not None:
            self.on_tokens(running.job, running, new, text)

    def decide(self, job: Job) -> Iterator[tuple[Job, Sample]]:
        """Ask `until` about the finished prefix; cancel the rest when it has seen enough."""
        if self.until is None or not job.decided(self.until):
            return
        rest = [s for s in job.result() if s.index not in job.finished]
        for s, running in enumerate(self.owners):
            if running is not None and running.job is job:
                self.free(s, running)
        job.waiting.clear()
        self.retire(job)
        for sample in rest:
            job.finished[sample.index] = sample
            yield job, sample

    def free(self, s: int, running: Running) -> None:
        running.done = True
        self.owners[s] = None
        clear_slot(self.step.slots, s)
        self.step.cache.allocator.give_back(running.pages)
        del running.job.running[running.index]
        if running.job.done:
            self.retire(running.job)

    def retire(self, job: Job) -> None:
        """A group without samples: its prompt and its graph are gone."""
        if job in self.active:
            self.active.remove(job)
            self.step.cache.allocator.give_back(job.pages)
            self.step.slots.group_key[job.group].fill_(-1)

    def clear(self) -> None:
        """Free everything, wherever the call was interrupted; the jobs keep their samples."""
        step = self.step
        step.slots.live.fill_(False)
        step.slots.pace.fill_(0)
        step.slots.group.fill_(-1)
        step.slots.group_key.fill_(-1)
        step.cache.reset()
