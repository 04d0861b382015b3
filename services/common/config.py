"""One frozen config object a service, from one schema: defaults < YAML file < environment < flags.

The scheduler's `max_num_seqs` is `max_num_seqs:` under `scheduler:` in the file, TRIPTYCH_SCHEDULER__MAX_NUM_SEQS in
the environment, --max-num-seqs on the command line. The double underscore keeps clear of the variables that Kubernetes
makes up for a Service (TRIPTYCH_SCHEDULER_PORT). An unknown key is an error in all of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsConfigDict, SettingsError

from services.common.errors import StartError
from services.common.guard import Admission
from services.common.server import Access
from services.common.tls import PeerTls, ServerTls

SERVICES = ("frontend", "scheduler", "executor")

C = TypeVar("C", bound="ServiceConfig")


_USERINFO = "userinfo"
_TOLD = frozenset({"extra_forbidden", "missing", _USERINFO})
"""Errors whose message is enough."""

SECRETS = frozenset({"otlp_headers"})
"""Keys whose values neither --print-config nor an error shows."""


class ServiceConfig(BaseModel):
    """Fields every service has."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    service: ClassVar[str]

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    model: str = Field(
        "SmolLM2-135M-Instruct",
        description="checkpoint folder, a hub's model as ORG/NAME, or a fetched one's name",
    )
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a hub's model; unset: the default branch"
    )
    offline: bool = Field(False, description="whether a hub's model is taken from the cache alone, without a network")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    log_format: Literal["text", "json"] = Field(
        "text", description="how a line of the log is written: text for people, json for collectors"
    )
    drain_s: float = Field(30.0, ge=0, le=86400, description="seconds that running requests are given after SIGTERM")
    metrics_host: str = Field("127.0.0.1", description="address where Prometheus is answered")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port where Prometheus is answered; 0 takes a free one; unset: none"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector's gRPC port, as http://HOST:4317, or https:// for TLS; unset: "
        "what OTEL_EXPORTER_OTLP_ENDPOINT says, else nothing is traced",
    )
    otlp_headers: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+\s*=")], ...] = Field(
        (),
        description="metadata sent to the collector, as KEY=VALUE, of which --print-config shows the KEY alone; a "
        "secret is better kept in OTEL_EXPORTER_OTLP_HEADERS, off the command line",
    )
    otlp_ca: Path | None = Field(
        None, description="PEM file of the authorities that may sign the collector's certificate; unset: the system's"
    )
    trace_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the traces that begin here which is kept; one that a caller began is kept as it says",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file of this server's certificate and those up to its CA; unset: plain text"
    )
    tls_key: Path | None = Field(None, description="PEM file of its key; both are read again when they change")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the CAs of which a client must show a certificate (mTLS); unset: of none"
    )
    health_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port that tells health alone, in plain text, to probes that speak no TLS; unset: none",
    )
    reflection: bool = Field(True, description="whether gRPC reflection tells the contract to everybody who asks")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false are for switches; quote a text")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _a_collector(cls, value: str | None) -> str | None:
        refuse_userinfo(value, "give what the collector asks for in otlp_headers")
        parts = urlsplit(value or "http://unset:1")
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise ValueError("a URL as http://HOST:4317 is needed, or https:// for TLS, without a path")
        return value

    @model_validator(mode="after")
    def _authorities_for_tls(self) -> Self:
        if self.otlp_ca is not None and not (self.otlp_endpoint or "").startswith("https://"):
            raise ValueError("otlp_ca is set, but otlp_endpoint is no https:// URL; only TLS has certificates")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{given} is set without {missing}; TLS needs both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca is set without tls_cert and tls_key; clients show certificates over TLS alone"
            )
        return self

    def tls(self) -> ServerTls | None:
        """Of the listener; None: plain text."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca)

    def access(self, admit: Admission | None = None) -> Access:
        """To the listener."""
        return Access(self.tls(), self.health_port, self.reflection, admit)


class InternalConfig(BaseModel):
    """Fields of a service whose callers are other services."""

    tls_client_names: tuple[str, ...] = Field(
        (),
        description="names (DNS or URI) of which a caller's certificate must have one; unset: any certificate of "
        "tls_client_ca",
    )

    @model_validator(mode="after")
    def _names_are_of_certificates(self) -> Self:
        for key in ("tls_client_names", "admin_names"):
            if getattr(self, key, ()) and getattr(self, "tls_client_ca", None) is None:
                raise ValueError(f"{key} is set without tls_client_ca; a caller's name is in its certificate")
        return self


class DialsConfig(BaseModel):
    """Fields of a service that dials another."""

    peer_ca: Path | None = Field(
        None, description="PEM file of the CAs that the service it dials may have a certificate of; unset: plain text"
    )
    peer_cert: Path | None = Field(None, description="PEM file of the certificate that it shows there (mTLS)")
    peer_key: Path | None = Field(None, description="PEM file of that one's key")
    peer_server_name: str = Field(
        "", description="name that the certificate there must have; unset: the host that is dialled"
    )

    @model_validator(mode="after")
    def _peer_tls_is_whole(self) -> Self:
        if (self.peer_cert is None) != (self.peer_key is None):
            given, missing = ("peer_cert", "peer_key") if self.peer_key is None else ("peer_key", "peer_cert")
            raise ValueError(f"{given} is set without {missing}; a certificate needs its key")
        if self.peer_ca is None and (self.peer_cert is not None or self.peer_server_name):
            raise ValueError("peer_cert or peer_server_name is set without peer_ca; TLS begins with whom to trust")
        return self

    def peer_tls(self) -> PeerTls | None:
        """Of the channel; None: plain text."""
        if self.peer_ca is None:
            return None
        return PeerTls(self.peer_ca, self.peer_cert, self.peer_key, self.peer_server_name)


def refuse_userinfo(url: str | None, advice: str) -> None:
    """Raises PydanticCustomError, which does not repeat it, for a URL with a password: those are shown and logged."""
    if url is not None and "@" in urlsplit(url).netloc:
        raise PydanticCustomError(_USERINFO, "a URL must hold no user and password; {advice}", {"advice": advice})


def host_port(value: str) -> str:
    """The value, where it is an address to dial. Raises ValueError."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError("HOST:PORT is needed, with a port from 1 to 65535")
    return value


HOST_PORT = AfterValidator(host_port)
Address = Annotated[str, HOST_PORT]
"""HOST:PORT of a peer."""


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """A config, and for each key that is not at its default where its value came from (file, environment, flag)."""

    config: C
    origin: Mapping[str, str]

    def lines(self) -> list[str]:
        """One "key: value  # source" a field, as YAML."""
        return [
            _secret_line(key, value, self.origin[key])
            if key in SECRETS and key in self.origin
            else f"{key}: {_yaml(value)}  # {self.origin.get(key, 'default')}"
            for key, value in self.config.model_dump(mode="json").items()
        ]


def load(config_type: type[C], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> C:
    """Reads all sources. Raises StartError in one line; exits after --help and --print-config."""
    return resolve(config_type, argv, environ).config


def resolve(config_type: type[C], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Resolved[C]:
    """The same, with each value's source."""
    environ = os.environ if environ is None else environ
    name = config_type.service
    parser = argparse.ArgumentParser(prog=f"triptych {name}", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file with one section a service")
    parser.add_argument("--print-config", action="store_true", help="print each value and its source, and exit")
    flags, options = _flags(config_type, parser, argv)
    sources = {
        "default": {},
        "file": _file(Path(options.config), name) if options.config else {},
        "environment": _environment(config_type, environ),
        "flag": flags,
    }
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, values in sources.items():
        merged.update(values)
        origin.update(dict.fromkeys(values, source))
    try:
        config = config_type.model_validate(merged)
    except ValidationError as error:
        raise StartError(f"{name}: {_explain(error, origin)}") from None
    resolved = Resolved(config, origin)
    if options.print_config:
        print("\n".join(resolved.lines()))
        sys.exit(0)
    return resolved


def _flags(
    config_type: type[ServiceConfig], parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[dict[str, Any], argparse.Namespace]:
    class Settings(BaseSettings, config_type):  # type: ignore[misc, valid-type]
        model_config = SettingsConfigDict(extra="ignore", protected_namespaces=())

    def parse(parser: argparse.ArgumentParser, args: Sequence[str]) -> argparse.Namespace:
        parsed = parser.parse_args(args)
        seen.append(parsed)
        return parsed

    seen: list[argparse.Namespace] = []
    source: Any = CliSettingsSource(
        Settings,
        root_parser=parser,
        cli_parse_args=list(argv),
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
        parse_args_method=parse,
    )
    fields = config_type.model_fields
    return {key: value for key, value in _read(source).items() if key in fields}, seen[-1]


def _file(path: Path, name: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise StartError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict):
        raise StartError(f"{path} must hold sections: {', '.join(SERVICES)}")
    if unknown := set(document) - set(SERVICES):
        raise StartError(f"{path} has unknown sections {sorted(map(str, unknown))}; known: {', '.join(SERVICES)}")
    section = document.get(name) or {}
    if not isinstance(section, dict):
        raise StartError(f"{path}: section {name} must hold keys")
    return section


def _environment(config_type: type[ServiceConfig], environ: Mapping[str, str]) -> dict[str, Any]:
    class Settings(BaseSettings, config_type):  # type: ignore[misc, valid-type]
        model_config = SettingsConfigDict(extra="ignore", protected_namespaces=())

    prefix = f"TRIPTYCH_{config_type.service.upper()}__"
    names = {f"{prefix}{field.upper()}": field for field in config_type.model_fields}
    mine = {key: value for key, value in environ.items() if key.startswith(prefix)}
    if unknown := sorted(set(mine) - set(names)):
        raise StartError(f"unknown environment variable {unknown[0]}; see `triptych {config_type.service} --help`")
    source = EnvSettingsSource(Settings, env_prefix=prefix, case_sensitive=False)
    source.env_vars = {key.lower(): value for key, value in mine.items()}
    return _read(source)


def _read(source: Callable[[], Any]) -> dict[str, Any]:
    """What a source says. Raises StartError for a list that cannot be read."""
    try:
        return dict(source())
    except SettingsError as error:
        raise StartError(f'{error}; in the environment a list is JSON: ["a", "b"]') from None


def _explain(error: ValidationError, origin: Mapping[str, str]) -> str:
    lines = []
    for item in error.errors():
        key = str(item["loc"][0]) if item["loc"] else "config"
        where = f" (from {origin[key]})" if key in origin else ""
        told = not item["loc"] or item["type"] in _TOLD  # of several keys: in the message
        value = "" if told or key in SECRETS else f", not {item['input']!r}"
        lines.append(f"{key}{where}: {item['msg']}{value}")
    return "; ".join(lines)


def _secret_line(key: str, pairs: Sequence[str], origin: str) -> str:
    """A comment: whoever reads the lines as a file must not take it for the value."""
    keys = ", ".join(f"{pair.partition('=')[0]}=..." for pair in pairs)
    return f"# {key}: {keys}  # {origin}, not shown"


def _yaml(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1_000_000).removesuffix("\n").removesuffix("...").strip()
    )
