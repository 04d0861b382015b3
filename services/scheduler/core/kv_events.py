"""What happens to the prefix cache, as plain data, for whoever routes requests to where their prefix is."""

from __future__ import annotations

from typing import NamedTuple


class Stored(NamedTuple):
    """A full block can be found now. `token_ids` is its column, little-endian uint32; `parent` the digest before it."""

    digest: bytes
    parent: bytes
    token_ids: bytes


class Removed(NamedTuple):
    """A block can no longer be found."""

    digest: bytes


class Cleared(NamedTuple):
    """No block can be found any more."""


KvEvent = Stored | Removed | Cleared
