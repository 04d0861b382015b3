"""An executor whose model is on an accelerator. Steps are launched one behind the other; nothing waits between them.

  step thread     launch N | launch N+1 |                | launch N+2
  device                   | step N           | step N+1           | step N+2
  results thread           | wait N           | wait N+1

What a step samples stays on the device, where the next one reads it; the host learns of it when the copy is there. A
slot is not reused before the result of its last step is known (StepPlan.freed_slots), so an id that comes late still
finds its request.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.common.checkpoint import config_hash, tokenizer_size
from services.common.errors import StartError
from services.executor import device_fusing, device_logprobs, dtypes, loader, memory
from services.executor.attention.contract import AttentionBackend, Needs
from services.executor.attention.selection import select
from services.executor.batch import PersistentBatch, StepInputs
from services.executor.device import Device, DeviceLostError, Event, as_array, index
from services.executor.device_elementwise import Elementwise
from services.executor.device_logprobs import FoundLogprobs, PendingScores
from services.executor.device_runner import DeviceRunner
from services.executor.device_sampler import NO_ID_LEFT, DeviceSampler, Drawn
from services.executor.dtypes import Dtypes
from services.executor.executor import Executor, Facts, Launched, check_context, masked_rows, outcome, warm_up_steps
from services.executor.graphs import DecodeGraphs, ladder
from services.executor.logprobs import Logprobs
from services.executor.masks import StepMasks
from services.executor.plan import MAX_IN_FLIGHT, Int64s, Outcome, Plan, RanksLostError, Settings
from services.executor.runner import ModelRunner
from services.executor.sampler import Masks, Sampled
from services.executor.sampling_columns import SampleRows

KV_SHARE = 0.9
"""Of the memory left after weights and activations; the rest is for graphs, the allocator and the driver."""
_CALIBRATION_SEED = 0
_HOST_LOOPS = frozenset({"mixtral", "qwen3_moe"})
"""Families whose experts are looped over on the host, which asks the device how many tokens each has."""

log = logging.getLogger(__name__)


class DeviceExecutor(Executor):
    """As Executor, with weights, KV and the newest ids on `device`. All but `lost` belongs to the step thread.

    `graph_sizes` are the rows that decode steps are captured for: None: a ladder up to the slots, where the attention
    backend and the family allow it; empty: none. `compile_mode` and `compile_backend` are device_elementwise's.
    """

    lost_error: type[RanksLostError] | type[DeviceLostError] = DeviceLostError

    def __init__(
        self,
        path: Path,
        *,
        device: Device,
        threads: int,
        kv_memory_bytes: int | None = None,
        attention_backend: str | None = None,
        graph_sizes: Sequence[int] | None = None,
        sampler_threads: int = 1024,
        compile_mode: str = "auto",
        compile_backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        super().__init__(path, threads=threads, kv_memory_bytes=kv_memory_bytes, attention_backend=attention_backend)
        self._device = device
        self._graph_sizes = graph_sizes
        self._sampler_threads = sampler_threads
        self.elementwise = Elementwise(compile_mode, device.torch_device.type, compile_backend)
        """Norms, gates and sums; says whether they are compiled."""
        self._backend: AttentionBackend | None = None
        self._device_runner: DeviceRunner | None = None
        self._device_sampler: DeviceSampler | None = None
        self._pending: deque[Step] = deque()
        self.graphs: DecodeGraphs | None = None
        """Once allocated; says which steps were replayed."""

    @cached_property
    def dtypes(self) -> Dtypes:
        return dtypes.on_device(self._path)

    def _bring(
        self,
        settings: Settings,
        dtype: torch.dtype,
        weights_hash: str,
        report: loader.Report,
        kv_dtype: torch.dtype | None,
    ) -> Facts:
        device = self._device
        torch.set_num_threads(self._threads)
        device.activate()
        checkpoint = self._load_on_device(dtype, report, weights_hash)
        shape = checkpoint.shape
        check_context(settings, shape.context_tokens)
        needs = Needs.of(
            shape,
            device=device.kind,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            block_tokens=settings.block_tokens,
            capability=device.capability,
            graphs=bool(self._graph_sizes),
        )
        backend = select(needs, self._attention_backend)
        sampler = DeviceSampler(device, shape.vocab_size, dtype, self._sampler_threads)
        device.load_kernels([*backend.instances(needs), *sampler.instances(dtype, self._sampler_threads)])
        runner = DeviceRunner(checkpoint, backend, needs, device, settings)
        self._checkpoint, self._settings, self._backend = checkpoint, settings, backend
        self._runner = self._device_runner = runner
        self._device_sampler = sampler
        try:
            kv_bytes = self._kv_bytes(runner, settings)
        except BaseException:
            self.unload()
            raise
        self._facts = Facts(
            device=device.name,
            weights_hash=checkpoint.weights_hash,
            config_hash=config_hash(self._path),
            vocab_size=shape.vocab_size,
            dtype=dtype,
            kv_dtype=needs.kv_dtype,
            block_bytes=shape.layers * needs.block_bytes,
            kv_bytes=kv_bytes,
        )
        return self._facts

    def _load_on_device(self, dtype: torch.dtype, report: loader.Report, weights_hash: str) -> loader.Checkpoint:
        checkpoint = loader.load(self._path, dtype, report, weights_hash, device=self._device)
        device_fusing.install(checkpoint.model, self.elementwise)
        return checkpoint

    def unload(self) -> None:
        super().unload()
        self._backend = self._device_runner = self._device_sampler = None

    def launch(self, plan: Plan, masks: StepMasks | None = None) -> Launched:
        """Queues a step. Raises BadPlanError before anything has changed; after any other error, also one that the
        outcome raises, the batch must be reset."""
        self._settle()
        step = self._launch(plan, masks)
        self._pending.append(step)
        return step

    def _launch(self, plan: Plan, masks: StepMasks | None = None) -> Step:
        try:
            return self._queue(plan, masks)
        except RuntimeError as error:
            self._check_lost(error)
            raise

    def execute(self, plan: Plan, masks: StepMasks | None = None) -> Outcome:
        return self.launch(plan, masks).outcome()

    def reset(self) -> None:
        self._forget()

    def _forget(self) -> None:
        super().reset()
        self._pending.clear()
        if self._device_runner is not None and self._batch is not None:
            self._device_runner.forget()

    def wait_for(self, event: Event) -> None:
        """Waits from any thread. Raises DeviceLostError, or what else went wrong on the device."""
        try:
            event.wait()
        except RuntimeError as error:
            self._check_lost(error)
            raise

    def _check_lost(self, error: RuntimeError) -> None:
        """Raises DeviceLostError where the device is gone for good."""
        if self._device.is_lost(error):
            reason = f"{self._device.name}: {error}"
            if not self._lost.done():
                self._lost.set_result(reason)
            raise DeviceLostError(reason) from error

    def _kv_bytes(self, runner: DeviceRunner, settings: Settings) -> int:
        """Bytes for KV, once the weights are there; a step of full size shows what it takes."""
        with torch.inference_mode():
            self.elementwise.prepare(runner.run_without_cache, settings.max_step_tokens)
        if self._kv_memory_bytes is not None:
            return memory.kv_budget_bytes(self._kv_memory_bytes, self._device.available_bytes())
        return self._share_of_rest(self._peak_bytes(runner, settings))

    def _peak_bytes(self, runner: DeviceRunner, settings: Settings) -> int:
        with torch.inference_mode():
            return self._device.peak_bytes(lambda: runner.run_without_cache(settings.max_step_tokens))

    def _share_of_rest(self, peak_bytes: int) -> int:
        rest = max(0, self._device.available_bytes() - peak_bytes)
        return memory.kv_budget_bytes(None, rest, share=KV_SHARE)

    def _make(self, runner: ModelRunner, settings: Settings, facts: Facts, num_blocks: int) -> None:
        runner.allocate(num_blocks)
        self._batch = PersistentBatch(settings, num_blocks, facts.vocab_size, tokenizer_size(self._path))
        with self._made[0].calibrating():
            self._warm(settings, facts, num_blocks)
        self._capture(settings)

    def _warm(self, settings: Settings, facts: Facts, num_blocks: int) -> None:
        """Runs a prompt and a decode, so that kernels are loaded, memory is taken and fixed scales are measured."""
        ids = np.random.default_rng(_CALIBRATION_SEED).integers(facts.vocab_size, size=settings.context_tokens)
        for step in warm_up_steps(settings, num_blocks):
            started = tuple(replace(one, token_ids=ids[: len(one.token_ids)].astype(np.uint32)) for one in step.started)
            self._launch(replace(step, started=started)).outcome()
        self._forget()

    def _capture(self, settings: Settings) -> None:
        runner, backend = self._made[0], self._backend
        sizes = self._sizes(settings, backend)
        self.graphs = DecodeGraphs(runner, self._device, sizes, settings.context_tokens)
        begun = time.perf_counter()
        with torch.inference_mode():
            self.graphs.capture()
        if sizes:
            log.info("captured decode steps at %s rows in %.1f s", _told(sizes), time.perf_counter() - begun)

    def _sizes(self, settings: Settings, backend: AttentionBackend | None) -> Sequence[int]:
        """What is captured. Raises StartError for what was asked for and cannot be."""
        asked, family = self._graph_sizes, self._made[0].model_type
        if asked is not None and not asked:
            return ()
        if asked and max(asked) > settings.max_slots:
            raise StartError(
                f"--cuda-graph-sizes holds {max(asked)}, but at most {settings.max_slots} requests run at once; ask "
                "for no more, or raise the scheduler's --max-num-seqs"
            )
        if family in _HOST_LOOPS:
            if asked:
                raise StartError(
                    f"--cuda-graph-sizes asks for graphs, but {family}'s experts cannot be captured; leave it unset"
                )
            log.info("decode steps run eagerly: %s's experts cannot be captured", family)
            return ()
        if backend is None or not backend.graphs:
            log.info("decode steps run eagerly: %s cannot be captured", "nothing" if backend is None else backend.name)
            return ()
        return asked or ladder(settings.max_slots)

    @property
    def _made(self) -> tuple[DeviceRunner, DeviceSampler]:
        if self._device_runner is None or self._device_sampler is None:
            raise RuntimeError("a step before load")
        return self._device_runner, self._device_sampler

    def _settle(self) -> None:
        """Takes in what the device has told since; a step that is one too many is waited for."""
        while self._pending and (self._pending[0].is_done or len(self._pending) >= MAX_IN_FLIGHT):
            self._take_in(self._pending.popleft())

    def _take_in(self, step: Step) -> None:
        """Tells the batch what a step gave."""
        if self._batch is not None:
            step.outcome()
            self._batch.settle(step.slots, step.places, step.drawn_ids)
            self._batch.mark_failed(step.failed_slots)

    @torch.inference_mode()
    def _queue(self, plan: Plan, masks: StepMasks | None) -> Step:
        batch, (runner, _) = self._batch, self._made
        if batch is None or self._facts is None:
            raise RuntimeError("a step before allocate")
        begun, device = time.perf_counter(), self._device
        inputs = batch.begin(plan)
        first = device.record()
        runner.follow(batch, plan)
        runner.copy_blocks(plan.copies)
        batch.fail(inputs.failed_slots)
        step = Step(self, plan.step, inputs, first)
        if not inputs.slots.size:
            masked_rows(inputs, masks, begun)
            return step.ends(first, device.record())
        drawn_slots = batch.drawn_slots(inputs)
        if inputs.scored:
            logits, hidden = runner.run_with_hidden(inputs, batch.tables, drawn_slots)
            step.scores = self._score_prompts(inputs, hidden, self._facts.vocab_size)
            step.in_graph = False
            if self.graphs is not None:
                self.graphs.eager += 1
        elif self.graphs is not None:
            logits, step.in_graph = self.graphs.run(inputs, batch.tables, drawn_slots)
        else:
            logits = runner.run(inputs, batch.tables, drawn_slots)
        computed = device.record()
        slots = all_slots = index(inputs.slots, device)
        masked = masked_rows(inputs, masks, begun)
        if inputs.sampling_rows.size:
            step.slots = inputs.slots[inputs.sampling_rows]
            if len(step.slots) < len(inputs.slots):
                slots = index(step.slots, device)
            newest = runner.newest_ids.index_select(0, slots)
            drawn = self._draw(logits, batch.sample_rows(inputs), masked, newest)
            before = runner.failed.index_select(0, slots)
            failed = torch.where(before != 0, before, drawn.failed)
            runner.failed.index_copy_(0, slots, failed)
            runner.newest_ids.index_copy_(0, slots, torch.where(failed != 0, 0, drawn.token_ids))
            step.places = batch.expect(step.slots)
            step.take(drawn, device)
        step.take_failed(runner.failed.index_select(0, all_slots), device)
        return step.ends(computed, device.record())

    def _score_prompts(self, inputs: StepInputs, hidden: torch.Tensor, vocab_size: int) -> PendingScores:
        runner = self._made[0]
        return device_logprobs.score(inputs.scored, hidden, runner.head, vocab_size, runner.failed, self._device)

    def _draw(self, logits: torch.Tensor, rows: SampleRows, masks: Masks | None, newest_ids: torch.Tensor) -> Drawn:
        return self._made[1].draw(logits, rows, masks, newest_ids)


_NONE = np.zeros(0, np.int64)


@dataclass(eq=False)
class Step:
    """A step's results on their way to the host; an executor's Launched."""

    executor: DeviceExecutor
    number: int
    inputs: StepInputs
    first: Event
    slots: Int64s = field(default_factory=_NONE.copy)
    """of the rows that sample"""
    places: Int64s = field(default_factory=_NONE.copy)
    """where their ids stand"""
    scores: PendingScores = field(default_factory=PendingScores)
    in_graph: bool | None = None
    is_done: bool = False
    drawn_ids: Int64s = field(default_factory=_NONE.copy)
    """once it is done; 0 where a row failed"""
    failed_slots: Int64s = field(default_factory=_NONE.copy)
    """of this step's rows, also those that failed in a step before; once it is done"""
    _computed: Event | None = None
    _last: Event | None = None
    _row_failed: torch.Tensor | None = None
    _token_ids: torch.Tensor | None = None
    _drawn: Drawn | None = None
    _logprobs: FoundLogprobs | None = None

    def take(self, drawn: Drawn, device: Device) -> None:
        """Brings to the host what was drawn."""
        self._drawn = drawn
        self._token_ids = device.download(drawn.token_ids)
        self._logprobs = None if drawn.logprobs is None else drawn.logprobs.downloaded(device)

    def take_failed(self, row_failed: torch.Tensor, device: Device) -> None:
        """Brings to the host which rows' slots have failed, [rows] int32."""
        self._row_failed = device.download(row_failed)

    def ends(self, computed: Event, last: Event) -> Step:
        """All of it is queued."""
        self._computed, self._last = computed, last
        return self

    @cached_property
    def _found(self) -> Outcome:
        if self._last is None or self._computed is None:
            raise RuntimeError("a step that was not queued whole")
        self.executor.wait_for(self._last)
        why = np.zeros(len(self.inputs.slots), np.int32) if self._row_failed is None else as_array(self._row_failed)
        self.failed_slots = self.inputs.slots[why != 0]
        sampled = self._sampled(why[self.inputs.sampling_rows])
        found = outcome(self.number, self.inputs, sampled, self.scores.told(frozenset(self.failed_slots.tolist())))
        return replace(
            found,
            execute_us=self._computed.us_since(self.first),
            sample_us=self._last.us_since(self._computed),
            in_graph=self.in_graph,
        )

    def outcome(self) -> Outcome:
        found = self._found
        self.is_done = True
        return found

    def _sampled(self, why: npt.NDArray[np.int32]) -> Sampled | None:
        """`why` the rows that sample have failed, 0 where they have not."""
        if self._drawn is None or self._token_ids is None:
            return None
        failed = why != 0
        self.drawn_ids = np.where(failed, 0, as_array(self._token_ids))
        logprobs = Logprobs.none() if self._logprobs is None else self._logprobs.told(self._drawn.tops)
        good = ~failed[self._drawn.scored]
        return Sampled(self.drawn_ids, failed, self._drawn.scored[good], logprobs.where(good), why == NO_ID_LEFT)


def _told(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} sizes up to {max(sizes)}"
