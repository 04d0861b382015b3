"""A call's arguments as the contract's request messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from triptych.inference.v1 import inference_pb2

from triptych_client import messages as _messages
from triptych_client import options as _options
from triptych_client import tools as _tools
from triptych_client.messages import MessageLike
from triptych_client.options import OptionArgs
from triptych_client.tools import ToolChoiceLike, ToolLike

TENANT_KEY = "triptych-tenant"
TENANT_BYTES = 128


def metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    """What names a tenant in a call; nothing for none. Raises ValueError for one that gRPC could not carry."""
    if not all(" " <= character <= "~" for character in tenant) or len(tenant) > TENANT_BYTES:
        raise ValueError(f"tenant {tenant[:TENANT_BYTES]!r} is not {TENANT_BYTES} bytes of printable ASCII at most")
    return ((TENANT_KEY, tenant),) if tenant else ()


def authorization(token: str) -> tuple[tuple[str, str], ...]:
    """What shows a token in a call; nothing for none. Raises ValueError for one that metadata could not carry."""
    if not all("!" <= character <= "~" for character in token):
        raise ValueError("the token holds a space, or more than ASCII; give it as it was issued, without `Bearer`")
    return (("authorization", f"Bearer {token}"),) if token else ()


def generate(
    model: str, prompt: str | Iterable[int], add_special_tokens: bool | None, options: OptionArgs
) -> inference_pb2.GenerateRequest:
    """Of a text or ids. Raises TypeError and ValueError for what no field can hold."""
    request = inference_pb2.GenerateRequest(
        model=model, add_special_tokens=add_special_tokens, options=_options.to_proto(options)
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=prompt))
    return request


def chat(
    model: str,
    messages: str | Iterable[MessageLike],
    tools: Iterable[ToolLike],
    tool_choice: ToolChoiceLike | None,
    parallel_tool_calls: bool | None,
    continue_final_message: bool,
    template_args: Mapping[str, Any] | None,
    options: OptionArgs,
) -> inference_pb2.ChatRequest:
    """Of a conversation. Raises TypeError and ValueError for what no field can hold."""
    request = inference_pb2.ChatRequest(
        model=model,
        messages=_messages.to_proto(messages),
        tools=_tools.to_proto(tools),
        tool_choice=_tools.choice_to_proto(tool_choice),
        parallel_tool_calls=parallel_tool_calls,
        continue_final_message=continue_final_message,
        options=_options.to_proto(options),
    )
    if template_args is not None:
        request.template_args.update(template_args)
    return request
