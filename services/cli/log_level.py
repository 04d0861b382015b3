"""`triptych log-level`: how much running services log, until it is set again or for some time."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import TypeAlias

import grpc
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.cli.access_flags import TOKEN_VARIABLE, add_access_flags, tls_of, token_metadata
from services.cli.engines import DEFAULT_ADDRESS, address
from services.common.errors import StartError
from services.common.logs.logger_levels import LEVELS
from services.common.peer import Peer

CONFIGURED = "configured"
TIMEOUT_S = 15.0

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_ADVICE = {
    grpc.StatusCode.UNAUTHENTICATED: f"; give it in the variable {TOKEN_VARIABLE}, or with --token",
    grpc.StatusCode.UNAVAILABLE: "; if it speaks TLS, look at --tls-ca, --tls-cert and --tls-server-name",
}

_EPILOG = """A scheduler sets its executor's level too. A frontend is asked on its admin port, where it has one
(--admin-port), and wants the token or the certificate of an admin where its auth is on; a scheduler with mutual TLS
wants a certificate of its admin_names. LOGGER is a module's name, such as services.scheduler.engine, or the beginning
of names up to a dot; what no process asked has a logger of is refused."""


def run(argv: Sequence[str]) -> int:
    """Exit code 0 where every process asked has set it, 1 where one has not."""
    parser = argparse.ArgumentParser(prog="triptych log-level", description=__doc__, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("level", choices=(*LEVELS, CONFIGURED), help="configured: what the configuration says again")
    parser.add_argument(
        "addresses",
        nargs="*",
        type=address,
        metavar="HOST:PORT",
        default=[DEFAULT_ADDRESS],
        help=f"of schedulers, and of frontends' admin ports ({DEFAULT_ADDRESS})",
    )
    parser.add_argument("--logger", default="", help="of which loggers; by default of all")
    parser.add_argument("--for-s", type=int, metavar="S", help="after so many seconds, as configured again")
    add_access_flags(parser)
    parsed = parser.parse_args(argv)
    request = admin_pb2.SetLogLevelRequest(
        level="" if parsed.level == CONFIGURED else parsed.level, logger=parsed.logger, duration_s=parsed.for_s
    )
    tls = tls_of(parsed)
    peers = [Peer(address, tls) for address in parsed.addresses]
    return asyncio.run(_set_all(peers, request, token_metadata(parsed)))


async def _set_all(peers: Sequence[Peer], request: admin_pb2.SetLogLevelRequest, shown: Metadata) -> int:
    told = await asyncio.gather(*(_set(peer, request, shown) for peer in peers), return_exceptions=True)
    for one in told:
        if isinstance(one, BaseException):
            raise one
    return max(one for one in told if isinstance(one, int))


async def _set(peer: Peer, request: admin_pb2.SetLogLevelRequest, shown: Metadata) -> int:
    """Prints what each process has done. Raises StartError where none has."""
    stub = admin_pb2_grpc.AdminServiceStub(peer.channel())
    try:
        answer = await stub.SetLogLevel(request, timeout=TIMEOUT_S, metadata=shown)
    except grpc.aio.AioRpcError as error:
        advice = _ADVICE.get(error.code(), "")
        raise StartError(f"{peer.target}: {error.code().name}: {error.details()}{advice}") from None
    finally:
        await peer.close()
    level = f"{request.level or 'as configured'}{f' for {request.duration_s} s' if request.duration_s else ''}"
    for service in answer.services:
        print(f"{peer.target} {service.name}: {service.error or level}")
    return int(any(service.error for service in answer.services))
