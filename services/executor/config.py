"""Configuration of the executor's process. What model is served how is the scheduler's to say (EngineConfig)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from services.common.config import ServiceConfig


class ExecutorConfig(ServiceConfig):
    """Fields of `triptych executor`."""

    service: ClassVar[str] = "executor"

    port: int = Field(50053, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    device: str = Field(
        "cpu",
        description="device that holds weights and KV: cpu, cuda, cuda:N, or auto: the first CUDA device where one "
        "can be used",
    )
    attention_backend: str | None = Field(
        None, description="attention backend by name, as `triptych doctor` lists them; unset: the best that serves"
    )
    cuda_graph_sizes: str = Field(
        "auto",
        description="rows that decode steps are captured for as CUDA graphs, as 1,2,4,8; auto: a ladder up to the "
        "scheduler's max_num_seqs, where they can be captured; off: none",
    )
    kernels: Path | None = Field(
        None, description="folder that `make kernels` wrote; unset: build/kernels beside the sources"
    )
    kv_memory_bytes: int | None = Field(
        None,
        gt=0,
        description="bytes for the KV tensors, of each rank; unset: half of what the cgroup leaves after the weights, "
        "divided by the ranks; on a GPU nine tenths of what is free after weights and activations",
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

    @field_validator("device")
    @classmethod
    def _a_device(cls, value: str) -> str:
        if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", value):
            raise ValueError("cpu, cuda, cuda:N or auto is needed")
        return value

    @field_validator("cuda_graph_sizes")
    @classmethod
    def _sizes(cls, value: str) -> str:
        parts = [part.strip() for part in value.split(",")]
        if value not in ("auto", "off") and not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError("auto, off, or numbers from 1 as 1,2,4,8 are needed")
        return ",".join(parts)

    @property
    def graph_sizes(self) -> tuple[int, ...] | None:
        """Of cuda_graph_sizes; None: auto."""
        if self.cuda_graph_sizes == "auto":
            return None
        return () if self.cuda_graph_sizes == "off" else tuple(map(int, self.cuda_graph_sizes.split(",")))
