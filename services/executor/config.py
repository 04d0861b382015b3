"""Configuration of the executor's process. What model is served how is the scheduler's to say (EngineConfig)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from services.common.config import ServiceConfig


class ExecutorConfig(ServiceConfig):
    """Fields of `triptych executor`."""

    service: ClassVar[str] = "executor"

    port: int = Field(50053, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    device: Literal["cpu"] = Field("cpu", description="device that holds weights and KV")
    kv_memory_bytes: int | None = Field(
        None,
        gt=0,
        description="bytes for the KV tensors, of each rank; unset: half of what the cgroup leaves after the weights, "
        "divided by the ranks",
    )
    threads: int | None = Field(
        None, ge=1, description="compute threads, of each rank; unset: the CPUs the cgroup grants, divided by the ranks"
    )
    tp_size: int = Field(
        1, ge=1, le=64, description="ranks: processes on this machine that divide the model among them"
    )
    rank_timeout_s: float = Field(
        300.0, ge=1, le=86400, description="seconds that a rank waits for another before it gives the group up"
    )
