"""The frontend's configuration."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from services.common.config import Address, ServiceConfig
from services.frontend.request import Limits


class FrontendConfig(ServiceConfig):
    """What a frontend is told: where the engine is, whose tokenizer it uses, and what a request may ask for."""

    service: ClassVar[str] = "frontend"

    port: int = Field(50051, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    engine: Address = Field("127.0.0.1:50052", description="HOST:PORT of the scheduler")
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="processes that share the port; the kernel spreads connections over them, not calls",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="name that requests use; unset: the name of the checkpoint's folder"
    )
    served_model_alias: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="further names that requests may use"
    )
    max_message_bytes: int = Field(4 * 1024 * 1024, ge=4096, description="largest message of the public API, both ways")
    max_prompt_bytes: int = Field(
        1024 * 1024, ge=1, description="UTF-8 bytes of a text prompt, or of all messages of a chat together"
    )
    max_messages: int = Field(2048, ge=1, description="messages a chat may have")
    max_content_parts: int = Field(4096, ge=1, description="content parts of all messages of a chat together")
    max_choices: int = Field(16, ge=1, description="choices a request may ask for; an engine may take fewer")
    max_logprobs: int = Field(
        20, ge=0, description="alternatives to each id that a request may ask for; an engine may take fewer"
    )
    max_scored_tokens: int = Field(
        32 * 1024, ge=1, description="ids of a prompt whose logprobs a request may ask for (prompt_logprobs)"
    )
    max_stop_strings: int = Field(64, ge=0, description="stop strings a request may have")
    max_stop_string_bytes: int = Field(1024, ge=1, description="UTF-8 bytes of one stop string")
    max_stop_token_ids: int = Field(256, ge=0, description="stop ids a request may have")
    max_logit_biases: int = Field(1024, ge=0, description="logit_bias entries a request may have")
    max_allowed_token_ids: int = Field(4096, ge=0, description="allowed_token_ids a request may have")
    max_banned_token_ids: int = Field(4096, ge=0, description="banned_token_ids a request may have")
    max_detokenize_ids: int = Field(256 * 1024, ge=1, description="ids of one Detokenize")
    max_cache_salt_bytes: int = Field(256, ge=0, description="UTF-8 bytes of a cache_salt")
    min_priority: int = Field(
        -1000,
        ge=-1000,
        le=1000,
        description="lowest priority value, the first to run, that callers may ask for; it goes before fair shares",
    )
    max_min_delta_tokens: int = Field(4096, ge=0, description="min_delta_tokens that a request may ask for")
    max_min_delta_interval_ms: int = Field(10_000, ge=0, description="min_delta_interval_ms that a request may ask for")

    max_unread_tokens: int = Field(
        64 * 1024,
        ge=1,
        description="ids of an answer, alternatives to them included, that may wait for a client that reads slowly; "
        "with more its call ends",
    )
    slow_reader_s: float = Field(
        60.0,
        gt=0,
        le=86400,
        description="seconds that a message may wait for the client to take it before its call ends",
    )

    @field_validator("max_prompt_bytes")
    @classmethod
    def _fits_a_message(cls, prompt_bytes: int, info: ValidationInfo) -> int:
        """A larger prompt would be refused as a message, by gRPC, before this limit is looked at."""
        message_bytes = info.data.get("max_message_bytes")
        if message_bytes is not None and prompt_bytes >= message_bytes:
            raise ValueError(f"must be below max_message_bytes, {message_bytes}, which holds the prompt")
        return prompt_bytes

    def limits(self) -> Limits:
        """Of one request."""
        return Limits(
            message_bytes=self.max_message_bytes,
            prompt_bytes=self.max_prompt_bytes,
            messages=self.max_messages,
            content_parts=self.max_content_parts,
            choices=self.max_choices,
            logprobs=self.max_logprobs,
            scored_tokens=self.max_scored_tokens,
            stop_strings=self.max_stop_strings,
            stop_string_bytes=self.max_stop_string_bytes,
            stop_token_ids=self.max_stop_token_ids,
            logit_biases=self.max_logit_biases,
            allowed_token_ids=self.max_allowed_token_ids,
            banned_token_ids=self.max_banned_token_ids,
            detokenize_ids=self.max_detokenize_ids,
            cache_salt_bytes=self.max_cache_salt_bytes,
            min_priority=self.min_priority,
            min_delta_tokens=self.max_min_delta_tokens,
            min_delta_interval_ms=self.max_min_delta_interval_ms,
            unread_tokens=self.max_unread_tokens,
            slow_reader_s=self.slow_reader_s,
        )
