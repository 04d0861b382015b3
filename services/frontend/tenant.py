"""Whose request it is: the label that fair shares count by, and that cached blocks are kept apart by."""

from __future__ import annotations

from typing import Any

from services.common.caller import CALLER, DELEGATE
from services.common.errors import invalid
from services.common.guard import denied

KEY = "triptych-tenant"
"""The metadata key."""
MAX_BYTES = 128


def tenant_of(context: Any) -> str:
    """The tenant of a call; "" for one that names none and has no identity.

    Where callers are known, the tenant is their identity's, and a label must be the same, but for a caller who may
    speak for others. Else the label is the caller's own and not to be trusted. Raises INVALID_ARGUMENT naming the key,
    PERMISSION_DENIED for another tenant's label.
    """
    caller, label = CALLER.get(), _label(context)
    if caller is None:
        return label
    if not label or label == caller.tenant:
        return caller.tenant
    if DELEGATE not in caller.roles:
        raise denied("OTHER_TENANT", f"{KEY} names another tenant than the caller's own; leave it out")
    return label


def _label(context: Any) -> str:
    metadata = context.invocation_metadata() or ()
    if any(key == f"{KEY}-bin" for key, _ in metadata):
        raise invalid(f"{KEY}-bin", f"is binary; name the tenant as text, in {KEY}")
    labels = [value for key, value in metadata if key == KEY]
    if len(labels) > 1:
        raise invalid(KEY, f"stands {len(labels)} times in the metadata; a call has one tenant")
    return _checked(labels[0]) if labels else ""


def _checked(label: str | bytes) -> str:
    # gRPC gives bytes where a value is not UTF-8.
    text = label if isinstance(label, str) else label.decode("latin-1")
    if not all(" " <= character <= "~" for character in text):
        raise invalid(KEY, "holds more than printable ASCII")
    if len(text) > MAX_BYTES:
        raise invalid(KEY, f"has {len(text)} bytes, at most {MAX_BYTES} are taken")
    return text
