"""What this engine is: the model's figures, agreed between its checkpoint, the operator and the executor."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.engine.v1 import engine_pb2
from triptych.executor.v1 import executor_pb2

from services.common import checkpoint
from services.common.contract import CLOCK_OFFSET, PROTOCOL_VERSION, RESUME, TRACE_CONTEXT
from services.common.errors import StartError
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.executor_link import ExecutorFacts
from services.scheduler.fragments import FRAGMENT_BYTES

log = logging.getLogger(__name__)

_DTYPES = {
    "auto": executor_pb2.D_TYPE_UNSPECIFIED,
    "float32": executor_pb2.D_TYPE_FLOAT32,
    "bfloat16": executor_pb2.D_TYPE_BFLOAT16,
    "float16": executor_pb2.D_TYPE_FLOAT16,
    "float8_e4m3": executor_pb2.D_TYPE_E4M3,
    "int8": executor_pb2.D_TYPE_INT8,
}


FEATURES = (RESUME, TRACE_CONTEXT, CLOCK_OFFSET)
"""Optional parts of the engine contract that are always served."""

MAX_IN_FLIGHT = 2
"""One step that runs and one that waits for it keep an executor busy; more would only make what is new wait longer."""


@dataclass(frozen=True)
class Model:
    """The checkpoint as the scheduler sees it, and the operator's limits on it."""

    name: str
    folder: str
    path: Path
    revision: str
    """The hub's commit; empty for a folder of no hub."""
    tokenizer_hash: str
    config_hash: str
    vocab_size: int | None
    """None where config.json leaves it to its family's default; the executor's then holds."""
    tokenizer_size: int | None
    """Ids of the tokenizer, None where it tells none; the vocabulary may be padded past them."""
    context_tokens: int
    config: SchedulerConfig

    @classmethod
    def read(cls, config: SchedulerConfig) -> Model:
        """Raises StartError for a checkpoint that cannot be read, or limits that cannot be."""
        path: Path = checkpoint.find(config.model, revision=config.revision, offline=config.offline)
        figures = checkpoint.read_config(path)
        folder = checkpoint.name(path)
        return cls(
            name=config.served_model_name or folder,
            folder=folder,
            path=path,
            revision=checkpoint.revision(path),
            tokenizer_hash=checkpoint.tokenizer_hash(path),
            config_hash=checkpoint.config_hash(path),
            vocab_size=figures.vocab_size,
            tokenizer_size=checkpoint.tokenizer_size(path),
            context_tokens=_context_tokens(config, figures.context_tokens, path),
            config=config,
        )

    def text_vocab_size(self, vocab_size: int) -> int:
        """Ids that stand for text, of the `vocab_size` that the executor's model has."""
        return min(vocab_size, self.tokenizer_size or vocab_size)

    def engine_config(self) -> executor_pb2.EngineConfig:
        """What the executor is to load."""
        config = self.config
        return executor_pb2.EngineConfig(
            model=self.folder,
            revision=self.revision,
            dtype=_DTYPES[config.dtype],
            kv_dtype=_DTYPES[config.kv_dtype],
            context_tokens=self.context_tokens,
            block_tokens=config.block_size,
            max_slots=config.max_num_seqs,
            max_step_tokens=config.max_num_batched_tokens,
            tp_size=config.tp_size,
        )

    def limits(self, facts: ExecutorFacts) -> Limits:
        """The core's limits on an executor. Raises StartError when the two do not belong together."""
        if self.vocab_size not in (None, facts.vocab_size):
            raise StartError(
                f"the executor's model has {facts.vocab_size} ids, {self.folder} here has {self.vocab_size}: "
                "give both the same --model"
            )
        if facts.config_hash not in ("", self.config_hash):
            raise StartError(
                f"the executor's config.json has SHA-256 {facts.config_hash[:12]}, that of {self.folder} here "
                f"{self.config_hash[:12]}: give both the same --model"
            )
        num_blocks = self._num_blocks(facts)
        pool_tokens = (num_blocks - 1) * self.config.block_size
        if pool_tokens < self.context_tokens:
            log.warning(
                "the KV pool holds %d tokens: the context is lowered to that from %d; a larger executor "
                "--kv-memory-bytes or --num-kv-blocks raises it",
                pool_tokens,
                self.context_tokens,
            )
        return Limits(
            vocab_size=facts.vocab_size,
            context_tokens=min(self.context_tokens, pool_tokens),
            num_blocks=num_blocks,
            block_tokens=self.config.block_size,
            max_slots=self.config.max_num_seqs,
            max_step_tokens=self.config.max_num_batched_tokens,
            max_waiting=self.config.max_waiting_requests,
            max_in_flight=facts.max_in_flight,
            max_waiting_tokens=self.config.max_waiting_tokens,
            tenant_share=self.config.tenant_queue_share,
            prefill_reserve=self._prefill_reserve_tokens,
            max_overtakes=self.config.max_overtakes,
            max_queue_wait_ns=None if (wait_s := self.config.max_queue_wait_s) is None else round(1e9 * wait_s),
        )

    @property
    def _prefill_reserve_tokens(self) -> int:
        configured = self.config.prefill_reserve_tokens
        return self.config.max_num_batched_tokens // 4 if configured is None else configured

    def max_in_flight(self, facts: ExecutorFacts) -> int:
        """Steps to keep under way at once; the executor may take more than the operator wants."""
        wanted = self.config.max_in_flight or MAX_IN_FLIGHT
        if self.config.max_in_flight is not None and wanted > facts.max_in_flight:
            log.warning(
                "--max-in-flight is %d, but the executor takes %d, which it is then", wanted, facts.max_in_flight
            )
        return min(wanted, facts.max_in_flight)

    def fingerprint(self, facts: ExecutorFacts) -> str:
        """Equal fingerprints, equal ids: SHA-256 over weights, tokenizer, dtypes, and ranks, whose sums round apart."""
        parts = [facts.weights_hash, self.tokenizer_hash, facts.dtype, facts.kv_dtype]
        if self.config.tp_size > 1:
            parts.append(f"tp {self.config.tp_size}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def hello(self, facts: ExecutorFacts, limits: Limits, features: Sequence[str] = ()) -> engine_pb2.EngineHello:
        """What every frontend is told first."""
        return engine_pb2.EngineHello(
            version=PROTOCOL_VERSION,
            features=(*FEATURES, *features),
            engine_id=secrets.token_hex(8),
            model=self.name,
            fingerprint=self.fingerprint(facts),
            vocab_size=limits.vocab_size,
            context_tokens=limits.context_tokens,
            block_tokens=limits.block_tokens,
            pool_tokens=limits.pool_tokens,
            max_choices=self.config.max_choices,
            max_logprobs=self.config.most_logprobs,
            fragment_bytes=FRAGMENT_BYTES,
        )

    def blocks_of_later_epoch(self, facts: ExecutorFacts, first: Limits) -> int:
        """As many as in the first epoch, fewer where a restarted executor has less memory now.

        Raises StartError when they no longer hold the context that frontends were told.
        """
        fitting = facts.kv_bytes // facts.block_bytes
        needed = -(-first.context_tokens // first.block_tokens) + 1
        if fitting < needed:
            raise StartError(
                f"it has memory for {fitting} KV blocks now, the context of {first.context_tokens} tokens that was "
                f"promised needs {needed}; give the executor more --kv-memory-bytes, or restart the scheduler"
            )
        if fitting < first.num_blocks:
            log.warning("the executor's memory holds %d KV blocks now, %d before", fitting, first.num_blocks)
        return min(fitting, first.num_blocks)

    def _num_blocks(self, facts: ExecutorFacts) -> int:
        fitting = facts.kv_bytes // facts.block_bytes
        if fitting < 2:
            raise StartError(
                f"the executor has {facts.kv_bytes} bytes for KV, a block takes {facts.block_bytes} and 2 are needed; "
                "give it more --kv-memory-bytes, or lower --block-size"
            )
        wanted = self.config.num_kv_blocks
        if wanted is None:
            # More than all slots can fill would only be memory taken from others.
            return min(fitting, self.config.max_num_seqs * -(-self.context_tokens // self.config.block_size) + 1)
        if wanted > fitting:
            log.warning("--num-kv-blocks is %d, but the executor's memory holds %d, which it is then", wanted, fitting)
        return min(wanted, fitting)


def _context_tokens(config: SchedulerConfig, held: int | None, path: Path) -> int:
    """The longest context: --max-model-len, else the `held` tokens of config.json. Raises StartError."""
    wanted = config.max_model_len
    if held is None and wanted is None:
        raise StartError(
            f"{path / 'config.json'} has no max_position_embeddings, so the context is not known; say it in tokens "
            "with --max-model-len, and the executor refuses more than the model holds"
        )
    if wanted is None or held is None:
        return wanted or held or 0
    if wanted > held:
        raise StartError(f"--max-model-len is {wanted}, but {checkpoint.name(path)} holds {held} tokens at most")
    return wanted
