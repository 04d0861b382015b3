"""The least that a streaming gRPC server can be: what a frontend's rate of messages is compared with.

    python -m loadtest.bare_server --port 50051

It serves Generate and nothing else: to each call max_tokens times one and the same message, made once, the size of a
delta of one token.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from services.common.server import server_options

DELTA = inference_pb2.GenerateResponse(choices=[inference_pb2.Choice(text=" token", token_ids=[40_000])])


class BareService(inference_pb2_grpc.InferenceServiceServicer):
    """No text, no engine, no check."""

    async def Generate(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """The same delta, so many times."""
        for _ in range(request.options.max_tokens):
            yield DELTA


async def _serve(port: int) -> None:
    server = grpc.aio.server(options=server_options())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(BareService(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bare_server", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=50051)
    asyncio.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
