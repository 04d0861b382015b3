"""The frontend's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from services.common.config import Address, DialsConfig, ServiceConfig, refuse_userinfo
from services.common.server import ConnectionAge, is_loopback
from services.frontend.grammar_check import Budget as GrammarBudget
from services.frontend.quotas import Quota
from services.frontend.request import Limits
from services.frontend.template_processes import Budget as TemplateBudget


class FrontendConfig(DialsConfig, ServiceConfig):
    """What a frontend is told: where the engine is, whose tokenizer it uses, and what a request may ask for."""

    service: ClassVar[str] = "frontend"

    port: int = Field(50051, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    engine: Address = Field("127.0.0.1:50052", description="HOST:PORT of the scheduler")
    more_engines: tuple[Address, ...] = Field(
        (),
        description="HOST:PORT of further schedulers of the same model; requests go to the one that is expected to "
        "begin first, and go on at another when theirs is lost",
    )
    failover_s: float = Field(
        60.0,
        ge=0,
        le=86400,
        description="seconds that a request whose engine is lost waits for one to go on; then it ends UNAVAILABLE",
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="processes that share the port; the kernel spreads connections over them, not calls",
    )
    admin_host: str = Field("127.0.0.1", description="address that admin_port is listened on")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of its own for SetLogLevel, with the TLS and the auth of the public one, for callers with "
        "the role admin; beyond loopback it needs both; 0 takes a free one; unset: it is not served",
    )
    admin_names: tuple[str, ...] = Field(
        (),
        description="names (DNS or URI) of which a caller's certificate must have one for the role admin, with auth "
        "mtls; a name in auth_names may have the role too",
    )
    log_requests: bool = Field(
        True, description="whether each request is told in a line of the log as it ends, at level info"
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="name that requests use; unset: the name of the checkpoint's folder"
    )
    served_model_alias: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="further names that requests may use"
    )
    vllm_adapter: bool = Field(
        False,
        description="whether vllm.grpc.engine.VllmEngine is served too, for gateways such as SMG; "
        "it needs the extra vllm-adapter",
    )
    max_message_bytes: int = Field(4 * 1024 * 1024, ge=4096, description="largest message of the public API, both ways")
    max_connection_age_s: float | None = Field(
        None,
        ge=0.1,
        le=604_800,
        description="seconds after which a client's connection is ended, without loss to its calls, so that it looks "
        "for frontends again and work spreads over new ones; unset: never",
    )
    max_connection_age_grace_s: float = Field(
        3600.0,
        ge=0.1,
        le=604_800,
        description="seconds that calls go on after that, then they are cut; give more than the longest stream takes",
    )
    max_prompt_bytes: int = Field(
        1024 * 1024, ge=1, description="UTF-8 bytes of a text prompt, or of all that a chat holds"
    )
    max_messages: int = Field(2048, ge=1, description="messages a chat may have")
    max_content_parts: int = Field(
        4096, ge=1, description="content parts and tool calls of all messages of a chat together"
    )
    max_tools: int = Field(128, ge=0, description="tools a chat may have")
    max_tool_schema_bytes: int = Field(64 * 1024, ge=2, description="UTF-8 bytes of the JSON Schema of one tool")
    max_rendered_bytes: int = Field(
        4 * 1024 * 1024, ge=1, description="UTF-8 bytes of what a chat template may make of a chat"
    )
    template_timeout_s: float = Field(5.0, gt=0, description="seconds that a chat template may take; then it is ended")
    tool_call_format: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3_coder",
        "glm45",
        "llama3_json",
        "pythonic",
        "mistral",
        "mistral_v11",
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "kimi_k2",
    ] = Field("auto", description="how the model writes tool calls; auto: what its chat template shows")
    reasoning_format: Literal["auto", "none", "think", "mistral"] = Field(
        "auto", description="how the model sets reasoning apart; auto: what its chat template shows"
    )
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
    max_grammar_bytes: int = Field(
        64 * 1024,
        ge=1,
        le=512 * 1024,
        description="UTF-8 bytes of a grammar's texts: schemas, expressions, choices, tags",
    )
    grammar_compile_s: float = Field(
        5.0, gt=0, le=600, description="seconds that a grammar may take to compile, in a process of its own"
    )
    grammar_compile_bytes: int = Field(
        256 * 1024 * 1024, ge=16 * 1024 * 1024, description="memory that process may take for it"
    )
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

    auth: Literal["off", "tokens", "jwt", "mtls"] = Field(
        "off",
        description="how callers show who they are: tokens: bearer tokens whose hashes auth_tokens holds; jwt: bearer "
        "tokens that an issuer has signed; mtls: certificates of tls_client_ca; off: not at all, and a tenant is what "
        "a caller calls itself",
    )
    auth_tokens: Path | None = Field(
        None, description="YAML file of tokens' SHA-256, each with its tenant; read again when it changes"
    )
    auth_names: Path | None = Field(
        None,
        description="YAML file of names in certificates, each with its tenant; read again when it changes; unset: a "
        "caller's tenant is the first URI of its certificate, else the first name",
    )
    jwt_issuer: str | None = Field(None, min_length=1, description="iss that a JWT must have")
    jwt_audience: str | None = Field(None, min_length=1, description="aud that a JWT must have")
    jwt_keys: str | None = Field(
        None, min_length=1, description="the issuer's JWKS: a file, or a URL (https, or http of loopback)"
    )
    jwt_algorithms: tuple[
        Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"], ...
    ] = Field(("RS256", "ES256"), min_length=1, description="algorithms that a JWT may be signed by")
    jwt_tenant_claim: str = Field("sub", min_length=1, description="claim of a JWT that is the caller's tenant")
    jwt_roles_claim: str = Field("roles", min_length=1, description="claim that lists the caller's roles")
    jwt_leeway_s: float = Field(30.0, ge=0, le=600, description="seconds that clocks may differ, for exp, nbf and iat")
    tenant_requests_per_s: float | None = Field(
        None,
        gt=0,
        description="requests a second that a tenant may send to a frontend, whose workers share them evenly; unset: "
        "any number",
    )
    tenant_burst_requests: int = Field(
        20, ge=1, description="requests that may come at once, after a pause, within tenant_requests_per_s"
    )
    tenant_tokens_per_min: float | None = Field(
        None,
        gt=0,
        description="tokens a minute, of prompts and answers, that a tenant may use at a frontend, whose workers share "
        "them evenly; a tenant that has used more waits until they are made up for; unset: any number",
    )
    tenant_burst_tokens: int = Field(
        100_000, ge=1, description="tokens that may be used at once, after a pause, within tenant_tokens_per_min"
    )
    tenant_max_requests: int | None = Field(
        None,
        ge=1,
        description="requests of a tenant that may run at once in a frontend, whose workers share them evenly; unset: "
        "any number",
    )

    @model_validator(mode="after")
    def _auth_is_whole(self) -> Self:
        of_method = {"tokens": ("auth_tokens",), "jwt": ("jwt_issuer", "jwt_audience", "jwt_keys")}
        for method, keys in of_method.items():
            for key in keys:
                if self.auth == method and getattr(self, key) is None:
                    raise ValueError(f"auth is {method}, and {key} is not set; it needs {', '.join(keys)}")
                if self.auth != method and getattr(self, key) is not None:
                    raise ValueError(f"{key} is set, but auth is {self.auth}; set auth to {method}, or leave it out")
        if self.auth == "mtls" and self.tls_client_ca is None:
            raise ValueError("auth is mtls, and tls_client_ca is not set; it says whose certificates are taken")
        for key in ("auth_names", "admin_names"):
            if getattr(self, key) and self.auth != "mtls":
                raise ValueError(f"{key} is set, but auth is {self.auth}; set auth to mtls, or leave it out")
        return self

    @model_validator(mode="after")
    def _each_worker_has_a_share(self) -> Self:
        limited = {
            "tenant_burst_requests": self.tenant_requests_per_s is not None,
            "tenant_burst_tokens": self.tenant_tokens_per_min is not None,
            "tenant_max_requests": self.tenant_max_requests is not None,
        }
        for key, is_limited in limited.items():
            if is_limited and getattr(self, key) < self.workers:
                raise ValueError(
                    f"{key} is {getattr(self, key)}, and {self.workers} workers share it evenly: some would let "
                    f"nothing in; set it to {self.workers} or more, or start fewer workers"
                )
        return self

    @model_validator(mode="after")
    def _strangers_set_no_levels(self) -> Self:
        if self.admin_port is None or is_loopback(self.admin_host):
            return self
        unset = [key for key, is_unset in (("tls_cert", not self.tls_cert), ("auth", self.auth == "off")) if is_unset]
        if unset:
            raise ValueError(
                f"admin_host is {self.admin_host}, which others reach, without {' and '.join(unset)}; set both "
                "tls_cert and auth, or keep admin_host on loopback"
            )
        return self

    @field_validator("jwt_keys")
    @classmethod
    def _keys_come_safely(cls, value: str | None) -> str | None:
        refuse_userinfo(value, "an issuer's keys are public")
        if value is not None and value.startswith("http://") and not is_loopback(urlsplit(value).hostname or ""):
            raise ValueError("whoever is between could give keys of his own; use https")
        return value

    @field_validator("max_prompt_bytes")
    @classmethod
    def _fits_a_message(cls, prompt_bytes: int, info: ValidationInfo) -> int:
        """A larger prompt would be refused as a message, by gRPC, before this limit is looked at."""
        message_bytes = info.data.get("max_message_bytes")
        if message_bytes is not None and prompt_bytes >= message_bytes:
            raise ValueError(f"must be below max_message_bytes, {message_bytes}, which holds the prompt")
        return prompt_bytes

    def connection_age(self) -> ConnectionAge | None:
        """Of clients' connections; None: without end."""
        if self.max_connection_age_s is None:
            return None
        return ConnectionAge(self.max_connection_age_s, self.max_connection_age_grace_s)

    def quota(self) -> Quota:
        """Of a tenant."""
        return Quota(
            requests_per_s=self.tenant_requests_per_s,
            burst_requests=self.tenant_burst_requests,
            tokens_per_s=None if self.tenant_tokens_per_min is None else self.tenant_tokens_per_min / 60,
            burst_tokens=self.tenant_burst_tokens,
            max_requests=self.tenant_max_requests,
            processes=self.workers,
        )

    def template_budget(self) -> TemplateBudget:
        """Of rendering a chat."""
        return TemplateBudget(time_s=self.template_timeout_s, text_bytes=self.max_rendered_bytes)

    def grammar_budget(self) -> GrammarBudget:
        """Of one grammar."""
        return GrammarBudget(self.max_grammar_bytes, self.grammar_compile_s, self.grammar_compile_bytes)

    def limits(self) -> Limits:
        """Of one request."""
        return Limits(
            message_bytes=self.max_message_bytes,
            prompt_bytes=self.max_prompt_bytes,
            messages=self.max_messages,
            content_parts=self.max_content_parts,
            tools=self.max_tools,
            tool_schema_bytes=self.max_tool_schema_bytes,
            rendered_bytes=self.max_rendered_bytes,
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
            grammar_bytes=self.max_grammar_bytes,
            min_priority=self.min_priority,
            min_delta_tokens=self.max_min_delta_tokens,
            min_delta_interval_ms=self.max_min_delta_interval_ms,
            unread_tokens=self.max_unread_tokens,
            slow_reader_s=self.slow_reader_s,
        )
