"""The scheduler's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from services.common.config import Address, DialsConfig, InternalConfig, ServiceConfig
from services.common.sampling import logprob_bytes

DEFAULT_LOGPROBS = 20
MAX_SCORES_BYTES = 32 * 1024 * 1024
"""Of the prompt logprobs that one step may make: half of what a message between services may have."""


class SchedulerConfig(InternalConfig, DialsConfig, ServiceConfig):
    """Everything an operator may set."""

    service: ClassVar[str] = "scheduler"

    port: int = Field(50052, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    executor: Address = Field("127.0.0.1:50053", description="HOST:PORT of the executor")
    spare_executors: tuple[Address, ...] = Field(
        (),
        description="HOST:PORT of further ones of the same kind, each taken when the one before is lost and no other "
        "scheduler drives it",
    )
    recovery_s: float = Field(
        120.0,
        ge=0,
        le=86400,
        description="seconds that requests are kept when the executor is lost; without one then, they end UNAVAILABLE",
    )
    served_model_name: str | None = Field(None, description="name told to frontends; unset: the checkpoint folder's")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of the weights in use; auto: float32 on a CPU, which serves no other, the checkpoint's on a GPU",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3"] = Field(
        "auto",
        description="of keys and values; auto: that of the weights in use; bfloat16 takes half the memory of float32, "
        "int8 little more than a quarter, and ids may then differ from the model's; on a CPU float32, bfloat16 and "
        "int8 are served, on a GPU the dtype of the weights and float8_e4m3, which takes half of a 16-bit one",
    )
    tp_size: int = Field(1, ge=1, le=64, description="ranks of the executor, which must have been started with as many")
    max_model_len: int | None = Field(None, ge=1, description="longest context in tokens; unset: the model's")
    block_size: int = Field(16, ge=1, le=1024, description="tokens a KV block holds")
    max_num_seqs: int = Field(64, ge=1, le=65536, description="choices that run at once; a request of n takes n")
    max_num_batched_tokens: int = Field(256, ge=1, description="tokens computed in one step")
    prefill_reserve_tokens: int | None = Field(
        None,
        ge=0,
        description="tokens of a step that a prompt too long for it leaves to others, at most half; unset: a quarter",
    )
    max_overtakes: int = Field(
        16, ge=0, description="requests that may pass one which does not fit yet; then all wait for it"
    )
    prefix_cache: bool = Field(True, description="find the KV blocks of earlier requests by their content")
    num_kv_blocks: int | None = Field(
        None,
        ge=2,
        description="KV blocks, the null block included; unset: what fits the executor, and all requests can use",
    )
    max_waiting_requests: int = Field(1024, ge=0, description="choices that may wait; more are refused")
    max_waiting_tokens: int = Field(4_000_000, ge=1, description="prompt tokens that may wait; more are refused")
    max_queue_wait_s: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="seconds that a request may wait before it starts; one that is expected to wait longer is refused "
        "at once, one that has waited 15% longer then; unset: as long as it takes, or its deadline allows",
    )
    tenant_queue_share: float = Field(
        0.75, gt=0, le=1, description="part of the queue that one tenant may fill, so that others find room"
    )
    max_choices: int = Field(16, ge=1, le=1024, description="choices that one request may ask for (n)")
    max_logprobs: int | None = Field(
        None,
        ge=0,
        le=65536,
        description="alternatives to each id that a request may ask for (logprobs, prompt_logprobs); unset: 20, fewer "
        "where the prompt logprobs of a step of max_num_batched_tokens would pass 32 MB",
    )
    record: Path | None = Field(
        None, description="file to write what the core is told to, for `triptych replay`; it holds prompts and answers"
    )
    kv_event_log: int = Field(
        10_000,
        ge=1,
        description="changes of the prefix cache, one or more a step, kept for subscribers that come back; fewer where "
        "they tell of more than 262144 blocks together",
    )
    max_in_flight: int | None = Field(
        None, ge=1, le=2, description="steps under way at once; unset: what the executor takes, at most 2"
    )
    self_test_interval_s: float = Field(
        30.0, ge=0.1, le=86400, description="seconds without a token or a request after which a token is made as a test"
    )

    admin_names: tuple[str, ...] = Field(
        (),
        description="names of which a caller's certificate must have one for AdminService, but for GetLoad and "
        "GetStats; unset, with tls_client_ca: nobody; without tls_client_ca everybody who reaches the port is let in",
    )

    @model_validator(mode="after")
    def _reserve_within_half_a_step(self) -> Self:
        reserve, step = self.prefill_reserve_tokens, self.max_num_batched_tokens
        if reserve is not None and reserve > step // 2:
            raise ValueError(f"prefill_reserve_tokens is {reserve}, more than half of max_num_batched_tokens, {step}")
        return self

    @model_validator(mode="after")
    def _scores_within_a_message(self) -> Self:
        if self.max_logprobs and (size := self._scores_bytes(self.max_logprobs)) > MAX_SCORES_BYTES:
            raise ValueError(
                f"max_logprobs is {self.max_logprobs}: with max_num_batched_tokens {self.max_num_batched_tokens} the "
                f"prompt logprobs of a step may take {size} bytes, more than {MAX_SCORES_BYTES}; lower one"
            )
        return self

    @property
    def most_logprobs(self) -> int:
        """`max_logprobs`, resolved."""
        if self.max_logprobs is not None:
            return self.max_logprobs
        fitting = (k for k in range(DEFAULT_LOGPROBS, 0, -1) if self._scores_bytes(k) <= MAX_SCORES_BYTES)
        return next(fitting, 0)

    @property
    def most_scores_bytes(self) -> int:
        """Of the prompt logprobs that one step may make."""
        return self._scores_bytes(self.most_logprobs)

    def _scores_bytes(self, alternatives: int) -> int:
        return self.max_num_batched_tokens * logprob_bytes(alternatives)
