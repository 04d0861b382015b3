"""The bearer token of a call (RFC 6750), as its metadata has it."""

from __future__ import annotations

from typing import Any

from services.common.guard import unauthenticated

KEY = "authorization"
MAX_BYTES = 8192


def bearer_token(context: Any) -> str:
    """Raises UNAUTHENTICATED where there is none."""
    values = [value for key, value in context.invocation_metadata() or () if key == KEY]
    if not values:
        raise unauthenticated("NO_TOKEN", "a token is needed; send the metadata authorization: Bearer TOKEN")
    if len(values) > 1:
        raise unauthenticated("SEVERAL_TOKENS", f"{KEY} stands {len(values)} times in the metadata; send one token")
    value = values[0] if isinstance(values[0], str) else values[0].decode("latin-1")
    scheme, _, token = value.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise unauthenticated("NOT_BEARER", "only bearer tokens are taken; send authorization: Bearer TOKEN")
    if len(token) > MAX_BYTES:
        raise unauthenticated("UNKNOWN_TOKEN", f"the token has {len(token)} bytes, at most {MAX_BYTES} are read")
    return token.strip()
