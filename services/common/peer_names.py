"""Which of the certificates of a CA may call an internal service, and which its AdminService."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from services.common.caller import names_of
from services.common.guard import denied


@dataclass(frozen=True)
class PeerNames:
    """Names as certificates have them: DNS names, or URIs such as spiffe://cluster/frontend. No `callers`: all of the
    CA. No `admins`: nobody beyond the questions of `open_questions`."""

    callers: Sequence[str] = ()
    admins: Sequence[str] = ()
    admin_service: str = ""
    open_questions: Sequence[str] = ()

    async def admit(self, method: str, context: Any) -> AbstractContextManager[Any]:
        """Raises PERMISSION_DENIED."""
        names = names_of(context)
        service, _, call = method.lstrip("/").partition("/")
        if self.admin_service and service == self.admin_service and call not in self.open_questions:
            self._check(names, self.admins, "ADMIN_ONLY", f"{call} is for admins: admin_names")
        elif not (names and set(names) & set(self.admins)) and self.callers:
            self._check(names, self.callers, "PEER_NOT_ALLOWED", "the peers allowed here: tls_client_names")
        return nullcontext()

    @staticmethod
    def _check(names: Sequence[str], allowed: Sequence[str], reason: str, who: str) -> None:
        if not set(names) & set(allowed):
            shown = ", ".join(names) or "no name"
            raise denied(reason, f"the certificate has {shown}, which is not among {who}")
