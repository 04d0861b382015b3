"""The id of a call, which its caller is told before anything else."""

from __future__ import annotations

import uuid
from typing import Any

KEY = "triptych-request-id"
"""In the initial metadata."""


def new_id() -> str:
    """Unique."""
    return uuid.uuid4().hex


async def tell(context: Any, request_id: str) -> None:
    """Sends the initial metadata."""
    await context.send_initial_metadata(((KEY, request_id),))


async def greet(context: Any) -> str:
    """A new id, told at once, so that errors have one too."""
    request_id = new_id()
    await tell(context, request_id)
    return request_id
