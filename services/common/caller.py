"""Who a caller is: what its certificate names, and what it has been found to be."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

ADMIN = "admin"
"""May set log levels, and flush the engine's cache and follow it through the adapter for gateways."""
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


def names_of(context: Any) -> tuple[str, ...]:
    """What the client's certificate names (subject alternative names), none without one."""
    shown = context.auth_context().get("x509_subject_alternative_name", ())
    return tuple(name.decode("utf-8", "replace") for name in shown)


def identity_of(context: Any) -> dict[str, str]:
    """The field `identity` of a log: the tenant that a caller has been found to be, else its certificate's names."""
    identity = caller() or ", ".join(names_of(context))
    return {"identity": identity} if identity else {}
