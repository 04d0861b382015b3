"""The frontend's configuration."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from services.common.config import ServiceConfig


class FrontendConfig(ServiceConfig):
    """What a frontend is told: where the engine is, whose tokenizer it uses, and what a request may ask for."""

    service: ClassVar[str] = "frontend"

    port: int = Field(50051, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    engine: str = Field("127.0.0.1:50052", description="HOST:PORT of the scheduler")
    served_model_name: str | None = Field(
        None, min_length=1, description="name that requests use; unset: the name of the checkpoint's folder"
    )
    max_message_bytes: int = Field(4 * 1024 * 1024, ge=4096, description="largest message of the public API, both ways")
    max_stop_strings: int = Field(64, ge=0, description="stop strings a request may have")
    max_stop_string_bytes: int = Field(1024, ge=1, description="UTF-8 bytes of one stop string")
    max_stop_token_ids: int = Field(256, ge=0, description="stop ids a request may have")
    max_logit_biases: int = Field(1024, ge=0, description="logit_bias entries a request may have")
