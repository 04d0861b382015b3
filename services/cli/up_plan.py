"""What `triptych up` is asked to start: its command line, read into one checked plan."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.cli import gateway, up_tls
from services.cli.parts import config_type
from services.cli.processes import Command
from services.common import checkpoint
from services.common.config import SERVICES, Resolved, ServiceConfig, resolve
from services.common.errors import StartError
from services.common.server import free_port

GATEWAY_STOP_S = 10.0
"""A gateway has no answers of its own to finish once its frontend ends; it takes some seconds all the same."""

STOP_MARGIN_S = 5.0
"""Over a service's own drain time, before it is killed."""

log = logging.getLogger(__name__)

_PEERS = {"frontend": ("engine", "scheduler"), "scheduler": ("executor", "executor")}

_EPILOG = """Any option of a service is given with its name before it: --scheduler.block-size 16, --executor.threads 2,
--frontend.log-level debug. The scheduler and the executor take free ports unless they are told one."""


@dataclass(frozen=True)
class Plan:
    """Three services, checked: their configs, commands and addresses."""

    configs: Mapping[str, ServiceConfig]
    commands: Mapping[str, Command]
    addresses: Mapping[str, str]
    """By service, as reached from this machine."""
    probes: Mapping[str, str]
    """By service, where its health is told in plain text."""
    prompt: str | None
    ready_json: bool
    """Whether a program reads standard output: one JSON line once a token can be made, one when a service has ended."""
    parent_pid: int | None
    """The process that this one must not outlive; None: none."""
    gateway: str | None = None
    """HOST:PORT that HTTP is to be served on, "" for a free port; None: no gateway."""
    collector: str | None = None
    """The URL that the gateway's spans go to; None: it makes none."""
    served_name: str = ""
    """What requests call the model; known once its folder is."""

    @property
    def is_open(self) -> bool:
        """Clients need neither TLS nor a token."""
        return not up_tls.is_secured(self.configs["frontend"])


def read(argv: Sequence[str]) -> Plan:
    """Raises StartError in one line; exits after --help and --print-config."""
    own, passed = split(argv)
    options = _parser().parse_args(own)
    _refuse_together(options)
    flags = {name: flags_of(name, options, passed) for name in SERVICES}
    resolved = resolve_all(flags)
    if options.print_config:
        _print_config(resolved)
    ports = {name: port_of(resolved[name]) for name in SERVICES}
    hosts = {name: _reachable(resolved[name].config.host) for name in SERVICES}
    addresses = {name: f"{hosts[name]}:{ports[name]}" for name in SERVICES}
    for name in SERVICES:
        flags[name] += ["--port", str(ports[name])]
        if name in _PEERS:
            flag, peer = _PEERS[name]
            flags[name] += [f"--{flag}", addresses[peer]]
    configs = {name: resolved[name].config for name in SERVICES}
    up_tls.refuse(configs, prompt=options.prompt is not None, gateway=options.gateway is not None)
    probes = {name: f"{hosts[name]}:{up_tls.probe_port(configs[name], flags[name], ports[name])}" for name in SERVICES}
    commands = {
        name: Command(name, tuple(flags[name]), resolved[name].config.drain_s + STOP_MARGIN_S) for name in SERVICES
    }
    listen = _gateway(options.gateway, resolved["frontend"].config)
    collector = None if listen is None else _collector(resolved["frontend"].config, os.environ)
    return Plan(
        configs, commands, addresses, probes, options.prompt, options.ready_json, options.parent, listen, collector
    )


def _gateway(asked: str | None, frontend: ServiceConfig) -> str | None:
    """Where the gateway is to listen, of what --gateway was given. Raises StartError where it cannot."""
    if asked is None:
        return None
    if not frontend.model_dump()["vllm_adapter"]:
        raise StartError("--gateway needs the frontend's vllm_adapter; leave out --frontend.no-vllm-adapter")
    gateway.executable("--gateway")
    return asked and gateway.free_address(asked, "--gateway")


def _collector(frontend: ServiceConfig, environ: Mapping[str, str]) -> str | None:
    """Where the gateway's spans go: to that of the services', by the standard's variables too.

    Raises StartError for an otlp_endpoint that SMG has no way to; one that stands in the environment, for all that runs
    there, it goes without.
    """
    from services.common.telemetry import otlp

    endpoint = otlp.spans_endpoint(frontend, environ)
    if endpoint is None:
        return None
    endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
    try:
        gateway.trace_arguments(endpoint)  # told now, not after the weights are loaded
    except StartError:
        if frontend.otlp_endpoint is not None:
            raise
        log.warning(
            "the gateway traces nothing: the environment's collector is %s, and SMG sends to http://HOST:PORT alone",
            endpoint,
        )
        return None
    return endpoint


def gateway_command(listen: str, frontend: str, otlp_endpoint: str | None = None) -> Command:
    """To run the gateway on `listen` before the frontend at `frontend`; it traces where there is a collector's URL."""
    traces = ("--otlp-endpoint", otlp_endpoint) if otlp_endpoint is not None else ("--", "--log-level", "warn")
    return Command("gateway", ("--listen", listen, "--frontend", frontend, *traces), GATEWAY_STOP_S)


def pinned(plan: Plan, paths: Mapping[str, Path]) -> Plan:
    """The plan for services that read the folders at `paths` and ask no hub: each is told its commit, and to stay
    offline."""
    pinned = {name: _pinned(plan.commands[name], plan.configs[name], paths[name]) for name in SERVICES}
    chosen = plan.configs["frontend"].model_dump()["served_model_name"]
    name = str(chosen or checkpoint.name(paths["frontend"]))
    return replace(plan, commands={**plan.commands, **pinned}, served_name=name)


def _pinned(command: Command, config: ServiceConfig, path: Path) -> Command:
    if not checkpoint.of_hub(config.model):
        return command
    return replace(command, arguments=(*command.arguments, "--revision", checkpoint.revision(path), "--offline"))


def resolve_all(flags: Mapping[str, Sequence[str]]) -> dict[str, Resolved[ServiceConfig]]:
    """The three configs, given each service's flags. Raises StartError."""
    resolved = {name: resolve(config_type(name), flags[name]) for name in SERVICES}
    for name, (flag, _) in _PEERS.items():
        _refuse_peer(name, flag, resolved[name])
    return resolved


def flags_of(service: str, options: argparse.Namespace, passed: Mapping[str, Sequence[str]]) -> list[str]:
    """A service's own command line, out of what `add_options` and `split` took."""
    return [
        *_common(options),
        *_of_frontend(options, service),
        *_of_gateway(options, service),
        *_of_ranks(options, service),
        *passed[service],
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triptych up",
        description="Starts frontend, scheduler and executor on this machine; Ctrl-C ends all three.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument(
        "--gateway",
        metavar="HOST:PORT",
        nargs="?",
        const="",
        help="serve the OpenAI API over HTTP too, by the SMG gateway (by default on a free port of 127.0.0.1)",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="answer this (greedily) once ready, and serve on")
    parser.add_argument(
        "--ready-json",
        action="store_true",
        help='for programs: print {"address": ..., "model": ...} alone once ready, with "http": URL where there is a '
        'gateway, and {"ended": REASON} when one of the services has ended by itself',
    )
    parser.add_argument(
        "--parent", type=int, metavar="PID", help="for programs: end at once when this process, the parent, is gone"
    )
    parser.add_argument("--print-config", action="store_true", help="print all values and their sources, and exit")
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is said of several services, or of the frontend, without a service's name before it."""
    parser.add_argument(
        "--model",
        help="checkpoint folder, a hub's model as ORG/NAME, or a fetched one's name; by default the embedded one",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub's model; by default its default branch")
    parser.add_argument("--offline", action="store_true", help="take a hub's model from the cache, ask no network")
    parser.add_argument("--host", help="address the frontend listens on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port the frontend listens on (50051)")
    parser.add_argument(
        "--tp", type=int, metavar="RANKS", help="processes of the executor that divide the model among them (1)"
    )
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send the spans of all, the gateway's too, to this OpenTelemetry collector, as http://HOST:4317",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with one section a service")


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Takes --service.flag and the values that follow it out of the command line."""
    own: list[str] = []
    passed: dict[str, list[str]] = {name: [] for name in SERVICES}
    target = own
    for token in argv:
        if token.startswith("--") or token == "-h":
            target, token = _addressee(token, own, passed)
        target.append(token)
    return own, passed


def _addressee(token: str, own: list[str], passed: dict[str, list[str]]) -> tuple[list[str], str]:
    service, dot, flag = token.removeprefix("--").partition(".")
    if not dot or "=" in service:
        return own, token
    if service not in passed:
        raise StartError(f"{token}: no service {service!r}; services: {', '.join(SERVICES)}")
    return passed[service], f"--{flag}"


def _refuse_together(options: argparse.Namespace) -> None:
    if options.ready_json and options.prompt is not None:
        raise StartError("--ready-json and --prompt both write to standard output; give one of them")
    if options.parent is not None and options.parent != os.getppid():
        raise StartError(
            f"--parent is {options.parent}, but process {os.getppid()} started this one; give the pid of the process "
            "that starts `triptych up`, if it still runs"
        )


def _common(options: argparse.Namespace) -> list[str]:
    flags = []
    for name in ("model", "revision", "config", "otlp_endpoint"):
        if (value := getattr(options, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", value]
    return [*flags, "--offline"] if options.offline else flags


def _of_frontend(options: argparse.Namespace, name: str) -> list[str]:
    if name != "frontend":
        return []
    given = {"host": options.host, "port": options.port}
    return [part for key, value in given.items() if value is not None for part in (f"--{key}", str(value))]


def _of_gateway(options: argparse.Namespace, name: str) -> list[str]:
    return ["--vllm-adapter"] if name == "frontend" and getattr(options, "gateway", None) is not None else []


def _of_ranks(options: argparse.Namespace, name: str) -> list[str]:
    return [] if name == "frontend" or options.tp is None else ["--tp-size", str(options.tp)]


def _refuse_peer(name: str, flag: str, resolved: Resolved[ServiceConfig]) -> None:
    if flag in resolved.origin:
        raise StartError(
            f"{name}.{flag} (from {resolved.origin[flag]}): `triptych up` starts that service itself; leave it out, or "
            "run the three by hand"
        )


def _print_config(resolved: Mapping[str, Resolved[ServiceConfig]]) -> None:
    """As a file that --config takes; the peers' addresses are comments, since `up` chooses them."""
    for name, part in resolved.items():
        print(f"{name}:")
        peer, _ = _PEERS.get(name, ("", ""))
        for line in part.lines():
            print(f"  # {peer}: chosen at start" if peer and line.startswith(f"{peer}:") else f"  {line}")
    raise SystemExit(0)


def port_of(resolved: Resolved[ServiceConfig]) -> int:
    """The port to use: the configured one where it was chosen (or is the frontend's), else a free one."""
    config = resolved.config
    frontend = config.service == "frontend"
    try:
        return free_port(config.host, config.port if frontend or "port" in resolved.origin else 0)
    except OSError as error:
        raise StartError(
            f"the {config.service} cannot listen on {config.host}:{config.port}: {error.strerror}; choose another with "
            + ("--port" if frontend else f"--{config.service}.port")
        ) from error


def _reachable(host: str) -> str:
    """A listener on every address is reached on loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
