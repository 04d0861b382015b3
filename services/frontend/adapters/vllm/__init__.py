"""vllm.grpc.engine.VllmEngine: what gateways such as SMG speak to an engine, served out of this frontend.

The contract is that of the package smg-grpc-proto. A request becomes one of our own API at the door, and goes the way
of all others; see docs/gateway.md for what each field does.
"""

from __future__ import annotations

from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server as add_to_server

from services.frontend.adapters.vllm.service import NAME, VllmEngineService

__all__ = ["NAME", "VllmEngineService", "add_to_server"]
