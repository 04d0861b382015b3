"""Python client of Triptych's public gRPC API.

async with Client("127.0.0.1:50051") as client:
    async for delta in client.chat("Why is the sky blue?", max_tokens=64):
        print(delta.text, end="", flush=True)
"""

from triptych_client import grammars
from triptych_client.client import DEFAULT_ADDRESS, Client, tls_credentials
from triptych_client.errors import TriptychError, Violation
from triptych_client.messages import Message
from triptych_client.options import OptionArgs, SamplingArgs
from triptych_client.results import (
    Completion,
    Delta,
    Finish,
    FinishReason,
    Model,
    PositionLogprobs,
    PromptInfo,
    TokenLogprob,
    ToolCall,
    Usage,
)
from triptych_client.retry import Retry
from triptych_client.stream import Stream
from triptych_client.sync import SyncClient, SyncStream
from triptych_client.tools import Tool

__all__ = [
    "DEFAULT_ADDRESS",
    "Client",
    "Completion",
    "Delta",
    "Finish",
    "FinishReason",
    "Message",
    "Model",
    "OptionArgs",
    "PositionLogprobs",
    "PromptInfo",
    "Retry",
    "SamplingArgs",
    "Stream",
    "SyncClient",
    "SyncStream",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "TriptychError",
    "Usage",
    "Violation",
    "grammars",
    "tls_credentials",
]
