"""Configuration of the executor's process. What model is served how is the scheduler's to say (EngineConfig)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.common.config import Address, InternalConfig, ServiceConfig


class ExecutorConfig(InternalConfig, ServiceConfig):
    """Fields of `triptych executor`."""

    service: ClassVar[str] = "executor"

    port: int = Field(50053, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    device: str = Field(
        "cpu",
        description="device that holds weights and KV: cpu, cuda, cuda:N, or auto: the first CUDA device where one "
        "can be used. Of ranks that rank 0 starts each has its own: cuda, or auto",
    )
    attention_backend: str | None = Field(
        None, description="attention backend by name, as `triptych doctor` lists them; unset: the best that serves"
    )
    cuda_graph_sizes: str = Field(
        "auto",
        description="rows that decode steps are captured for as CUDA graphs, as 1,2,4,8; auto: a ladder up to the "
        "scheduler's max_num_seqs, where they can be captured; off: none",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on a GPU, whether norms, gates and sums are compiled by torch.compile: auto: where triton and a C "
        "compiler are; on: else it does not start; off: torch's own kernels",
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
    tp_size: int = Field(1, ge=1, le=64, description="ranks: processes that divide the model among them")
    tp_rank: int | None = Field(
        None,
        ge=0,
        le=63,
        description="which of the ranks this process is, where each is started by itself, on a machine of its own "
        "perhaps; unset: rank 0, which starts the others on this machine",
    )
    tp_rendezvous: Address | None = Field(
        None,
        description="HOST:PORT where ranks that are started by themselves meet: rank 0 listens there, the others come",
    )
    rank_timeout_s: float = Field(
        300.0,
        ge=1,
        le=86400,
        description="seconds that a rank waits for another before it gives the group up; among ranks that have met, "
        "rank 0's holds",
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

    @model_validator(mode="after")
    def _a_rank_has_a_place_to_meet(self) -> Self:
        if (self.tp_rank is None) != (self.tp_rendezvous is None):
            given, missing = (
                ("tp_rank", "tp_rendezvous") if self.tp_rendezvous is None else ("tp_rendezvous", "tp_rank")
            )
            raise ValueError(f"{given} is set without {missing}; a rank that is started by itself needs both")
        if self.tp_rank is not None and self.tp_rank >= self.tp_size:
            raise ValueError(
                f"tp_rank is {self.tp_rank}, ranks of tp_size {self.tp_size} are 0 to {self.tp_size - 1}; raise tp_size"
            )
        if self.tp_rank and self.metrics_port is not None:
            raise ValueError(
                f"metrics_port is set, but tp_rank is {self.tp_rank}; rank 0 tells those of all ranks, leave it unset"
            )
        if self.tp_rank is not None and self.tp_size == 1:
            raise ValueError(
                "tp_rank is set, but tp_size is 1; one rank meets no other, set tp_size to how many there are"
            )
        return self

    @property
    def ranks_here(self) -> int:
        """Ranks that share this machine's memory and CPUs."""
        return self.tp_size if self.tp_rank is None else 1
