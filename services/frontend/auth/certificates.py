"""A caller by its certificate, which TLS has checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.caller import ADMIN, Identity, names_of
from services.common.guard import denied, unauthenticated
from services.frontend.auth.listed import Names
from services.frontend.tenant import MAX_BYTES


class Certificates:
    """With a file the names it lists, each with its tenant; without one a name is a tenant. `admins` are names whose
    callers have the role admin, whatever the file says."""

    def __init__(self, path: Path | None, admins: Sequence[str] = ()) -> None:
        self._names = Names(path) if path is not None else None
        self._admins = frozenset(admins)

    async def identify(self, context: Any) -> Identity:
        """Raises UNAUTHENTICATED, or PERMISSION_DENIED for a name that is not listed."""
        names = names_of(context)
        if not names:
            raise unauthenticated("NO_NAME", "the certificate has no subject alternative name, which says who calls")
        identity = self._of(names)
        return replace(identity, roles=identity.roles | {ADMIN}) if self._admins & set(names) else identity

    def _of(self, names: Sequence[str]) -> Identity:
        if self._names is None:
            return Identity(_checked(next((name for name in names if "://" in name), names[0])))
        if (identity := self._names.find(tuple(names))) is None:
            raise denied("UNKNOWN_NAME", f"the certificate's names are not listed here: {', '.join(names)}")
        return identity


def _checked(name: str) -> str:
    if len(name) > MAX_BYTES or not all(" " <= character <= "~" for character in name):
        raise denied("UNKNOWN_NAME", f"the certificate's name is no tenant: {MAX_BYTES} bytes of ASCII at most are")
    return name
