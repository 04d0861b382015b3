"""An issuer's public keys: a JWKS (RFC 7517) out of a file, or fetched and kept for a while."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jwt

from services.common.errors import StartError
from services.common.reloaded import Reloaded

FRESH_S = 300.0
"""A fetched set is fetched anew after this."""
LEAST_S = 10.0
"""Between two fetches, whatever key ids callers name."""
TIMEOUT_S = 5.0
MAX_SET_BYTES = 1024 * 1024

log = logging.getLogger(__name__)


class FileKeys:
    """Keys of a file. Raises StartError where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._file = Reloaded([path], lambda: _read_file(path))

    async def find(self, key_id: str | None) -> jwt.PyJWK | None:
        """None where there is no such key; a token without a key id is of the only key, if there is one alone."""
        return _find(self._file.now(), key_id)


class FetchedKeys:
    """Keys behind a URL. Where it does not answer, those that were there before stay."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._keys: Mapping[str | None, jwt.PyJWK] = {}
        self._tried_s: float | None = None
        self._one_at_a_time = asyncio.Lock()

    async def find(self, key_id: str | None) -> jwt.PyJWK | None:
        """As FileKeys does. The first caller in a while waits for the fetch, at most `TIMEOUT_S`."""
        if self._age_s() >= FRESH_S or _find(self._keys, key_id) is None:
            async with self._one_at_a_time:
                if self._age_s() >= LEAST_S:
                    await self._fetch()
        return _find(self._keys, key_id)

    def _age_s(self) -> float:
        return float("inf") if self._tried_s is None else self._clock() - self._tried_s

    async def _fetch(self) -> None:
        self._tried_s = self._clock()
        try:
            self._keys = _parse(await asyncio.to_thread(_get, self._url))
        except (OSError, ValueError) as error:
            log.error("jwt_keys: cannot fetch %s: %s; %d keys stay in use", self._url, error, len(self._keys))


def of(source: str) -> FileKeys | FetchedKeys:
    """What jwt_keys names. Raises StartError."""
    return FetchedKeys(source) if source.startswith(("http://", "https://")) else FileKeys(Path(source))


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        body = bytes(answer.read(MAX_SET_BYTES + 1))
    if len(body) > MAX_SET_BYTES:
        raise ValueError(f"it has more than {MAX_SET_BYTES} bytes")
    return body


def _read_file(path: Path) -> Mapping[str | None, jwt.PyJWK]:
    try:
        return _parse(path.read_bytes())
    except OSError as error:
        raise StartError(f"jwt_keys: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise StartError(f"jwt_keys: {path}: {error}") from None


def _parse(text: bytes) -> Mapping[str | None, jwt.PyJWK]:
    """By key id. Symmetric keys are left out: who checks a token must not be able to make one. Raises ValueError."""
    document = json.loads(text)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError('is no JWKS, an object with a list "keys"')
    keys: dict[str | None, jwt.PyJWK] = {}
    for entry in listed:
        if isinstance(entry, dict) and _is_public(entry):
            try:
                key = jwt.PyJWK.from_dict(entry)
            except jwt.PyJWTError as error:  # a kind of key that is not known here does not spoil the others
                log.warning("jwt_keys: key %.64r is left out: %s", entry.get("kid"), error)
                continue
            keys[key.key_id] = key
    if not keys:
        raise ValueError("holds no public key (RSA, EC or OKP) for signatures")
    return keys


def _is_public(entry: Mapping[str, Any]) -> bool:
    return entry.get("kty") in ("RSA", "EC", "OKP") and entry.get("use", "sig") == "sig"


def _find(keys: Mapping[str | None, jwt.PyJWK], key_id: str | None) -> jwt.PyJWK | None:
    if key_id is None and len(keys) == 1:
        return next(iter(keys.values()))
    return keys.get(key_id)
