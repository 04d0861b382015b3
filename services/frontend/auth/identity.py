"""Who a caller is, once it is known."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

ADMIN = "admin"
"""May flush the engine's cache and follow it, through the adapter for gateways."""
DELEGATE = "delegate"
"""May speak for any tenant, named in the metadata: a gateway that has looked at its callers' credentials itself."""
ROLES = frozenset({ADMIN, DELEGATE})


@dataclass(frozen=True)
class Identity:
    """`tenant` is at most 128 bytes of printable ASCII."""

    tenant: str
    roles: frozenset[str] = frozenset()


CALLER: ContextVar[Identity | None] = ContextVar("caller", default=None)
"""Of the call that this task works on; None: calls have no identity here."""


def caller() -> str:
    """The tenant that the caller itself is, "" where callers are not known."""
    identity = CALLER.get()
    return identity.tenant if identity is not None else ""
