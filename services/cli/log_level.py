"""`triptych log-level`: how much running services log, until it is set again or for some time."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import grpc
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.cli.engines import DEFAULT_ADDRESS, address
from services.common.errors import StartError
from services.common.logs.logger_levels import LEVELS
from services.common.server import channel_options

CONFIGURED = "configured"
TIMEOUT_S = 15.0

_EPILOG = """A scheduler sets its executor's level too. A frontend is asked on its admin port, where it has one
(--admin-port). LOGGER is a module's name, such as services.scheduler.engine, or the beginning of names up to a dot;
what no process asked has a logger of is refused."""


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
    parsed = parser.parse_args(argv)
    request = admin_pb2.SetLogLevelRequest(
        level="" if parsed.level == CONFIGURED else parsed.level, logger=parsed.logger, duration_s=parsed.for_s
    )
    return asyncio.run(_set_all(parsed.addresses, request))


async def _set_all(addresses: Sequence[str], request: admin_pb2.SetLogLevelRequest) -> int:
    told = await asyncio.gather(*(_set(address, request) for address in addresses), return_exceptions=True)
    for one in told:
        if isinstance(one, BaseException):
            raise one
    return max(one for one in told if isinstance(one, int))


async def _set(target: str, request: admin_pb2.SetLogLevelRequest) -> int:
    """Prints what each process has done. Raises StartError where none has."""
    async with grpc.aio.insecure_channel(target, options=channel_options()) as channel:
        try:
            answer = await admin_pb2_grpc.AdminServiceStub(channel).SetLogLevel(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise StartError(f"{target}: {error.code().name}: {error.details()}") from None
    level = f"{request.level or 'as configured'}{f' for {request.duration_s} s' if request.duration_s else ''}"
    for service in answer.services:
        print(f"{target} {service.name}: {service.error or level}")
    return int(any(service.error for service in answer.services))
