"""A gRPC server and its process: options, the listener, reflection, health, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from services.common.errors import ErrorInterceptor, StartError
from services.common.guard import Admission, Guard
from services.common.health import Health
from services.common.tls import ServerTls

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of the internal streams, both ways. A 1M-token prompt is 4 MB."""

CUT_S = 1.0
"""What calls that were just ended are given to say so, before they are cut; a cut is CANCELLED to their callers."""

MAX_PENDING_CALLS = 100_000
"""Calls that have come and that the event loop has not seen yet; each is answered, or refused with a reason."""

_KEEPALIVE_PERMITTED = [
    # A client may ping as often as every 5 s, with or without calls, and gets no GOAWAY for it.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]


@dataclass(frozen=True)
class ConnectionAge:
    """When a connection is ended so that its client looks for servers again; its calls go on for `grace_s`, then are
    cut. gRPC varies the age by a tenth, so that clients do not all come back together."""

    most_s: float
    grace_s: float

    def options(self) -> list[tuple[str, Any]]:
        """Of a server."""
        return [
            ("grpc.max_connection_age_ms", round(self.most_s * 1000)),
            ("grpc.max_connection_age_grace_ms", round(self.grace_s * 1000)),
        ]


@dataclass(frozen=True)
class Access:
    """How a server is reached: plain text without `tls`. `health_port` tells health alone, in plain text, to probes
    that speak no TLS. `admit` lets calls in; health and reflection are open."""

    tls: ServerTls | None = None
    health_port: int | None = None
    reflection: bool = True
    admit: Admission | None = None


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES, *, shares_port: bool = False) -> list[tuple[str, Any]]:
    """Options of every Triptych server."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Else a port in use is an error, not a second listener.
        ("grpc.so_reuseport", int(shares_port)),
        # Past 1,000 calls that wait for this process, gRPC would cancel some by chance, without a reason that we name.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        *_KEEPALIVE_PERMITTED,
    ]


def channel_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES, *, max_reconnect_ms: int = 2_000
) -> list[tuple[str, Any]]:
    """Options of every channel between Triptych's services. A dead peer is noticed by keepalive within 15 s, and one
    that is not there is looked for again after `max_reconnect_ms` at the latest, where there is a call for it."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),  # its default of a minute would win over the line above
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", max_reconnect_ms),
    ]


def free_port(host: str, port: int) -> int:
    """A port that can be listened on now: `port`, or any where that is 0. Raises OSError where there is none."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


class Server:
    """One listener with health and reflection; servicers are added to `grpc` before `start`.

    With `shares_port`, other processes of this user listen on the port too (SO_REUSEPORT). Without `connection_age`,
    as the internal streams need it, a connection lives as long as its client keeps it. `interceptors` see calls
    and their errors from outside.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        shares_port: bool = False,
        connection_age: ConnectionAge | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        access: Access | None = None,
    ) -> None:
        self._access = access or Access()
        options = server_options(max_message_bytes, shares_port=shares_port)
        if connection_age is not None:
            options += connection_age.options()
        self._guards = [Guard(self._access.admit)] if self._access.admit is not None else []
        self.grpc = grpc.aio.server(interceptors=[*interceptors, ErrorInterceptor(), *self._guards], options=options)
        self._shares_port = shares_port
        self.health = Health()
        self.health.add_to(self.grpc)
        self._host = host
        self.port = port
        self._probes = self._health_server() if self._access.health_port is not None else None

    async def start(self, services: Sequence[str]) -> None:
        """Listens. `services` are full names for reflection. Raises StartError when the address cannot be bound."""
        if self._access.reflection:
            reflection.enable_server_reflection((*services, Health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)
        credentials = self._access.tls.credentials() if self._access.tls is not None else None
        if credentials is None:
            warn_of_plain_text(self._host)
        self.port = self._listen(self.grpc, self.port, "--port", credentials)
        if self._probes is not None and self._access.health_port is not None:
            self._listen(self._probes, self._access.health_port, "--health-port", None)
            await self._probes.start()
        await self.grpc.start()
        await self.health.set_live(True)

    def _health_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=server_options(shares_port=self._shares_port))
        self.health.add_to(server)
        return server

    def _listen(self, server: grpc.aio.Server, port: int, flag: str, tls: grpc.ServerCredentials | None) -> int:
        address = f"{self._host}:{port}" if ":" not in self._host else f"[{self._host}]:{port}"
        try:
            if not self._shares_port:
                free_port(self._host, port)  # says why not in one line; gRPC would write several
            return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the port was taken a moment ago"
            raise StartError(f"cannot listen on {address}: {reason}; choose another with --host and {flag}") from None

    async def run(self, drain: Callable[[], Awaitable[None]], *, drain_s: float) -> None:
        """Serves until SIGTERM or SIGINT, then drains.

        Draining: not ready at once; `drain` returns when no work is left, and is given `drain_s` seconds; then what is
        still open is cut. A second signal cuts at once.
        """
        loop = asyncio.get_running_loop()
        stop, cut = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (cut if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        await stop.wait()
        log.info("draining for up to %g s", drain_s)
        await self.health.set_ready(False)
        await self.health.set_generate(False)
        waits = [asyncio.ensure_future(drain()), asyncio.ensure_future(cut.wait())]
        await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await self.stop()

    async def stop(self) -> None:
        """Closes the listener and cuts what is open."""
        await self.health.set_live(False)
        await self.grpc.stop(grace=CUT_S)
        if self._probes is not None:
            await self._probes.stop(grace=None)
        for guard in self._guards:
            guard.refusals.close()
        log.info("stopped")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_of_plain_text(host: str) -> None:
    """Where others than this machine's users can listen in."""
    if not is_loopback(host):
        log.warning(
            "listening on %s in plain text: whoever is between reads prompts and answers; set tls_cert and tls_key, or "
            "keep others away (docs/security.md)",
            host,
        )
