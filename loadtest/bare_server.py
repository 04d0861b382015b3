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
from triptych.inference.v1 import inference_pb2

from services.common.server import server_options

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
DELTA = inference_pb2.GenerateResponse(choices=[inference_pb2.Choice(text=" token", token_ids=[40_000])])


async def _generate(request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """The same delta, so many times: no text, no engine, no check."""
    for _ in range(request.options.max_tokens):
        yield DELTA


async def _serve(port: int) -> None:
    server = grpc.aio.server(options=server_options())
    handler = grpc.unary_stream_rpc_method_handler(
        _generate,
        request_deserializer=inference_pb2.GenerateRequest.FromString,
        response_serializer=inference_pb2.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
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
