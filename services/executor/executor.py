"""What one executor process holds over its life: nothing, then a checkpoint, then KV tensors and a batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from kernels.cpu import paged_attention
from services.common import logs
from services.common.checkpoint import config_hash, revision, tokenizer_size
from services.common.errors import StartError
from services.executor import loader, memory
from services.executor.attention.contract import Needs
from services.executor.attention.selection import select
from services.executor.batch import PersistentBatch, ScoredSpan, StepInputs
from services.executor.device import DeviceLostError
from services.executor.dtypes import CPU_DTYPES, Dtypes
from services.executor.logprobs import Logprobs
from services.executor.masks import StepMasks
from services.executor.plan import Int64s, Outcome, Plan, RanksLostError, Settings, Started
from services.executor.runner import ModelRunner
from services.executor.sampler import Masks, Sampled, Sampler
from services.executor.sampling_params import SamplingParams
from services.executor.scorer import Head, Scored, score

log = logging.getLogger(__name__)

NOTHING_SCORED = Scored()

Score = Callable[[Sequence[ScoredSpan], torch.Tensor, Head, int], Scored]
"""`score`, or what a rank has in its place."""


@dataclass(frozen=True)
class Facts:
    """What the scheduler is told of a loaded checkpoint."""

    device: str
    weights_hash: str
    config_hash: str
    vocab_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_bytes: int
    kv_bytes: int


class Launched(Protocol):
    """A step under way on the device."""

    @property
    def is_done(self) -> bool:
        """Its outcome is there without waiting."""

    def outcome(self) -> Outcome:
        """Waits for it; from any thread. The outcomes of steps are asked for in their order."""


@dataclass(frozen=True, eq=False)
class Done:
    """A step whose outcome is there."""

    found: Outcome
    is_done = True

    def outcome(self) -> Outcome:
        return self.found


class Executor:
    """Weights, KV tensors and the persistent batch. Every method but the constructor runs on the step thread.

    `threads` compute threads; `kv_memory_bytes` for KV, None for memory.KV_SHARE of what is left; `attention_backend`
    by name, None for the best; `load` brings the checkpoint, `sampler` makes what draws from a vocabulary, `scorer`
    says how likely prompt ids are. Raises StartError for more threads than there are CPUs.
    """

    tp_size = 1
    """Ranks that share a model; this one alone."""
    lost_error: type[RanksLostError] | type[DeviceLostError] = RanksLostError
    """What `lost` is called."""

    def __init__(
        self,
        path: Path,
        *,
        threads: int,
        kv_memory_bytes: int | None = None,
        attention_backend: str | None = None,
        load: Callable[[Path, torch.dtype, loader.Report, str], loader.Checkpoint] = loader.load,
        sampler: Callable[[int], Sampler] = Sampler,
        scorer: Score | None = None,
    ) -> None:
        memory.check_threads(threads)
        self._path = path
        self._load = load
        self._make_sampler = sampler
        self._score = scorer or score
        self._threads = threads
        self._kv_memory_bytes = kv_memory_bytes
        self._attention_backend = attention_backend
        self._lost: Future[str] = Future()
        self._checkpoint: loader.Checkpoint | None = None
        self._settings: Settings | None = None
        self._facts: Facts | None = None
        self._runner: ModelRunner | None = None
        self._batch: PersistentBatch | None = None
        self._sampler: Sampler | None = None
        self._num_blocks = 0

    @property
    def revision(self) -> str:
        """The hub's commit that the files are of; empty where that is not known."""
        return revision(self._path)

    @property
    def lost(self) -> Future[str]:
        """Done once this process cannot work any more: why, for people."""
        return self._lost

    @property
    def dtypes(self) -> Dtypes:
        """What the model can be served in here."""
        return CPU_DTYPES

    def set_log_level(self, level: str, logger: str, duration_s: float | None) -> None:
        """Of all ranks. Raises ValueError, as Levels.set."""
        logs.levels().set(level, logger, duration_s)

    @property
    def mask_shape(self) -> tuple[int, int]:
        """Slots, and the vocabulary, that masks are for. Raises RuntimeError before a model is loaded."""
        if self._settings is None or self._facts is None:
            raise RuntimeError("masks before load")
        return self._settings.max_slots, self._facts.vocab_size

    def load(
        self,
        settings: Settings,
        dtype: torch.dtype,
        weights_hash: str,
        report: loader.Report,
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> Facts:
        """Loads the checkpoint to serve it by `settings`. Raises StartError, leaving nothing loaded.

        `weights_hash` is what the files must hash to; empty: anything. Keys and values are kept in `kv_dtype`; None: as
        the weights are computed in.
        """
        facts = self._bring(settings, dtype, weights_hash, report, kv_dtype)
        log.info("loaded %s, weights %s, %d bytes for KV", self._path, facts.weights_hash[:12], facts.kv_bytes)
        return facts

    def _bring(
        self,
        settings: Settings,
        dtype: torch.dtype,
        weights_hash: str,
        report: loader.Report,
        kv_dtype: torch.dtype | None,
    ) -> Facts:
        torch.set_num_threads(self._threads)
        paged_attention.set_num_threads(self._threads)
        checkpoint = self._load(self._path, dtype, report, weights_hash)
        shape = checkpoint.shape
        check_context(settings, shape.context_tokens)
        needs = Needs.of(
            shape, device="cpu", dtype=dtype, kv_dtype=kv_dtype or dtype, block_tokens=settings.block_tokens
        )
        runner = ModelRunner(checkpoint, select(needs, self._attention_backend), needs)
        kv_bytes = memory.kv_budget_bytes(self._kv_memory_bytes, memory.available_bytes())
        self._checkpoint, self._settings, self._runner = checkpoint, settings, runner
        self._facts = Facts(
            device="cpu",
            weights_hash=checkpoint.weights_hash,
            config_hash=config_hash(self._path),
            vocab_size=shape.vocab_size,
            dtype=needs.dtype,
            kv_dtype=needs.kv_dtype,
            block_bytes=shape.layers * needs.block_bytes,
            kv_bytes=kv_bytes,
        )
        return self._facts

    def unload(self) -> None:
        """Lets go of what `load` brought."""
        self._checkpoint = self._settings = self._facts = self._runner = None

    def grant_kv(self, kv_bytes: int) -> Facts:
        """Sets the bytes for KV, in place of what `load` has found. Returns the facts as they are now."""
        if self._facts is None:
            raise StartError("no model is loaded; call Load first")
        self._facts = replace(self._facts, kv_bytes=kv_bytes)
        return self._facts

    def must_allocate(self, num_blocks: int) -> bool:
        """Whether so many KV blocks are still to be made. Raises StartError where they cannot be."""
        if self._facts is None:
            raise StartError("no model is loaded; call Load first")
        if self._num_blocks:
            if num_blocks != self._num_blocks:
                raise StartError(f"{self._num_blocks} KV blocks are allocated already, {num_blocks} are asked for")
            return False
        fits = self._facts.kv_bytes // self._facts.block_bytes
        if not 2 <= num_blocks <= fits:
            raise StartError(
                f"{num_blocks} KV blocks of {self._facts.block_bytes} bytes are asked for; needed are 2 or more (block"
                f" 0 holds nothing), and {fits} fit into the {self._facts.kv_bytes} bytes for KV"
            )
        return True

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV tensors and warms up. The same number again does nothing; raises StartError for another one."""
        if not self.must_allocate(num_blocks):
            return
        if self._runner is None or self._settings is None or self._facts is None:
            raise StartError("no model is loaded; call Load first")
        try:
            self._make(self._runner, self._settings, self._facts, num_blocks)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise StartError(
                f"there is no memory for {num_blocks} KV blocks, {self._settings.max_slots} slots and steps of"
                f" {self._settings.max_step_tokens} tokens; ask for less"
            ) from error
        self._num_blocks = num_blocks

    def _make(self, runner: ModelRunner, settings: Settings, facts: Facts, num_blocks: int) -> None:
        """What `allocate` is about."""
        runner.allocate(num_blocks)
        self._batch = PersistentBatch(settings, num_blocks, facts.vocab_size, tokenizer_size(self._path))
        self._sampler = self._make_sampler(facts.vocab_size)
        self._warm_up(self._batch, num_blocks)

    @torch.inference_mode()
    def execute(self, plan: Plan, masks: StepMasks | None = None) -> Outcome:
        """One step. Raises BadPlanError before anything has changed; after any other error the batch must be reset.

        `masks` are the plan's, which are waited for once the forward pass is done; what that raises is raised here.
        """
        if self._runner is None or self._batch is None or self._sampler is None or self._facts is None:
            raise RuntimeError("execute before allocate")
        begun = time.perf_counter()
        inputs = self._batch.begin(plan)
        self._runner.copy_blocks(plan.copies)
        self._batch.fail(inputs.failed_slots)
        if not inputs.slots.size:
            masked_rows(inputs, masks, begun)
            return outcome(plan.step, inputs, None)
        scored = NOTHING_SCORED
        if inputs.scored:
            logits, hidden = self._runner.forward_with_hidden(inputs, self._batch.tables)
            computed = time.perf_counter()
            scored = self._score(inputs.scored, hidden, self._runner.head, self._facts.vocab_size)
            self._batch.fail(np.array(scored.failed_slots, np.int64))
        else:
            logits = self._runner.forward(inputs, self._batch.tables)
            computed = time.perf_counter()
        if not inputs.sampling_rows.size:
            masked_rows(inputs, masks, begun)
            return _timed(outcome(plan.step, inputs, None, scored), begun, computed)
        masked = masked_rows(inputs, masks, begun)
        sampled = self._sampler.sample(logits, self._batch.sample_rows(inputs), masked)
        slots = inputs.slots[inputs.sampling_rows]
        sampled = replace(sampled, failed=sampled.failed | np.isin(slots, scored.failed_slots))
        self._batch.append(slots[~sampled.failed], sampled.token_ids[~sampled.failed])
        self._batch.fail(slots[sampled.failed])
        return _timed(outcome(plan.step, inputs, sampled, scored), begun, computed)

    def launch(self, plan: Plan, masks: StepMasks | None = None) -> Launched:
        """`execute`, where the device can be left to its work: the next step may be launched before this one is done.

        What goes wrong there is raised by the outcome.
        """
        return Done(self.execute(plan, masks))

    def reset(self) -> None:
        """Ends an epoch: every slot is forgotten."""
        if self._batch is not None:
            self._batch.reset()

    def close(self) -> None:
        """Ends what does not end with this object; of one rank there is nothing."""

    @torch.inference_mode()
    def _warm_up(self, batch: PersistentBatch, num_blocks: int) -> None:
        """Runs a prefill and a decode step of a made-up request, so that kernels are compiled and buffers grown."""
        if self._runner is None or self._sampler is None or self._settings is None:
            raise RuntimeError("warm-up before load")
        for step in warm_up_steps(self._settings, num_blocks):
            inputs = batch.begin(step)
            logits = self._runner.forward(inputs, batch.tables)
            self._sampler.sample(logits, batch.sample_rows(inputs))
            batch.append(inputs.slots, np.zeros(1, np.int64))
        batch.reset()


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, torch's, or what torch's CPU allocator raises as a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def check_context(settings: Settings, model_tokens: int) -> None:
    """Raises StartError where the model has fewer positions than are asked for."""
    if settings.context_tokens > model_tokens:
        raise StartError(f"a context of {settings.context_tokens} tokens is asked for, the model holds {model_tokens}")


def warm_up_steps(settings: Settings, num_blocks: int) -> list[Plan]:
    """Plans of a made-up request: a prompt as long as a step may have, and a decode where there is room for one."""
    room = min(settings.context_tokens, settings.max_step_tokens, (num_blocks - 1) * settings.block_tokens)
    blocks = -(-room // settings.block_tokens)
    prompt = max(1, room - 1)
    empty = np.zeros(0, np.int64)
    request = Started(
        slot=0,
        token_ids=np.zeros(prompt, np.uint32),
        prompt_tokens=prompt,
        computed_tokens=0,
        block_ids=np.arange(1, blocks + 1),
        sampling=SamplingParams(logprobs=1),
    )
    steps = [Plan(1, empty, (request,), empty.reshape(0, 2), np.array([0]), np.array([prompt]), None, None)]
    if prompt < room:
        steps.append(Plan(2, empty, (), empty.reshape(0, 2), np.array([0]), np.array([1]), None, None))
    return steps


def masked_rows(inputs: StepInputs, masks: StepMasks | None, begun: float) -> Masks | None:
    """The masks of the rows that sample; all of the step's are waited for, also those of rows that have failed."""
    if masks is None:
        return None
    words = masks.wait(spent_s=time.perf_counter() - begun)
    if not inputs.masked_rows.size:
        return None
    return Masks(inputs.masked_rows, np.stack([words[slot] for slot in inputs.masked_slots.tolist()]))


def outcome(step: int, inputs: StepInputs, sampled: Sampled | None, scored: Scored = NOTHING_SCORED) -> Outcome:
    """What a step gave, without its times."""
    counts = np.zeros(len(inputs.places) + len(inputs.failed_slots), np.int64)
    failed = inputs.failed_slots.tolist()
    none = np.zeros(0, np.int64)
    if sampled is None:
        return Outcome(
            step=step,
            token_counts=counts,
            token_ids=none,
            failed_slots=(*failed, *scored.failed_slots),
            logprob_places=none,
            logprobs=Logprobs.none(),
            prompt_scores=scored.scores,
        )
    good: np.ndarray[tuple[int], np.dtype[np.bool_]] = ~sampled.failed
    counts[inputs.places[inputs.sampling_rows]] = good
    told = good[sampled.scored]
    # An id's place is the number of good rows before its own.
    places: Int64s = (np.cumsum(good) - 1)[sampled.scored[told]]
    return Outcome(
        step=step,
        token_counts=counts,
        token_ids=sampled.token_ids[good],
        failed_slots=tuple(
            dict.fromkeys([*failed, *inputs.slots[inputs.sampling_rows][sampled.failed].tolist(), *scored.failed_slots])
        ),
        idless_slots=tuple(inputs.slots[inputs.sampling_rows][sampled.idless].tolist()),
        logprob_places=places,
        logprobs=sampled.logprobs.where(told),
        prompt_scores=scored.scores,
    )


def _timed(outcome: Outcome, begun: float, computed: float) -> Outcome:
    sample_us = _microseconds(computed, time.perf_counter())
    return replace(outcome, execute_us=_microseconds(begun, computed), sample_us=sample_us)


def _microseconds(begin: float, end: float) -> int:
    return int((end - begin) * 1e6)
