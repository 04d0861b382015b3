"""Files that give callers their tenants: a YAML list, of tokens' hashes or of names in certificates."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from services.common.caller import ROLES, Identity
from services.common.errors import StartError
from services.common.guard import unauthenticated
from services.common.reloaded import Reloaded
from services.frontend.auth.bearer import bearer_token
from services.frontend.tenant import MAX_BYTES

MAX_ENTRIES = 10_000
"""Of the tokens each is compared, in constant time, with the one that came."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: str = Field(min_length=1, max_length=MAX_BYTES, pattern=r"^[ -~]+$")
    roles: tuple[str, ...] = ()

    def identity(self) -> Identity:
        return Identity(self.tenant, frozenset(self.roles))


class _Token(_Entry):
    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")


class _Name(_Entry):
    name: str = Field(min_length=1)


class Tokens:
    """Bearer tokens by their SHA-256. Raises StartError where the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._file = Reloaded([path], lambda: _tokens(path))

    async def identify(self, context: Any) -> Identity:
        """Raises UNAUTHENTICATED."""
        digest = sha256(bearer_token(context).encode()).digest()
        found = None
        for known, identity in self._file.now():
            if hmac.compare_digest(known, digest):
                found = identity
        if found is None:
            raise unauthenticated("UNKNOWN_TOKEN", "the token is not known here; it may have been withdrawn")
        return found


class Names:
    """Names of certificates. Raises StartError where the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._file = Reloaded([path], lambda: _names(path))

    def find(self, names: tuple[str, ...]) -> Identity | None:
        """Of the first of them that is listed."""
        listed = self._file.now()
        return next((listed[name] for name in names if name in listed), None)


def _tokens(path: Path) -> list[tuple[bytes, Identity]]:
    entries = _read("auth_tokens", path, TypeAdapter(list[_Token]))
    return [(bytes.fromhex(entry.sha256), entry.identity()) for entry in entries]


def _names(path: Path) -> Mapping[str, Identity]:
    return {entry.name: entry.identity() for entry in _read("auth_names", path, TypeAdapter(list[_Name]))}


def _read(key: str, path: Path, kind: TypeAdapter[list[Any]]) -> list[Any]:
    """Raises StartError, which names the entry and what is wrong with it, and never a token's hash."""
    try:
        entries = kind.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")) or [])
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise StartError(f"{key}: cannot read {path}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise StartError(f"{key}: {path}: {where}: {first['msg']}") from None
    if len(entries) > MAX_ENTRIES:
        raise StartError(f"{key}: {path} has {len(entries)} entries, at most {MAX_ENTRIES} are taken; use auth jwt")
    for number, entry in enumerate(entries):
        if unknown := set(entry.roles) - ROLES:
            raise StartError(f"{key}: {path}: {number}.roles: {sorted(unknown)[0]!r} is no role; {sorted(ROLES)} are")
    return entries
