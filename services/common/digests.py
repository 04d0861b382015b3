"""Names of KV blocks: equal digests, equal keys and values. One rule for the frontend, which digests prompts, and the
scheduler, which goes on where they end.

A block's digest is chained over all tokens up to its end, so a block is found only behind the blocks before it:

    root = SHA-256("R" ‖ tenant ‖ salt ‖ adapter), each a 4-byte little-endian length and its UTF-8
    d[0] = SHA-256("B" ‖ root ‖ ids of block 0)        d[i] = SHA-256("B" ‖ d[i-1] ‖ ids of block i)

ids are little-endian uint32. SHA-256 (FIPS 180-4), since whoever finds two prompts of one digest reads another's cache.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32


def root_digest(*, tenant: str, salt: str, adapter: str) -> bytes:
    """What the first block is chained to: requests share blocks where all three are equal."""
    parts = [struct.pack("<I", len(data)) + data for data in (text.encode() for text in (tenant, salt, adapter))]
    return hashlib.sha256(b"R" + b"".join(parts)).digest()


def chained_digest(parent: bytes, ids: bytes) -> bytes:
    """Digest of a full block: `parent` of the block before it or the root, `ids` its little-endian uint32 column."""
    return hashlib.sha256(b"B" + parent + ids).digest()


def prompt_digests(root: bytes, prompt_ids: npt.NDArray[np.uint32], block_tokens: int) -> bytes:
    """Digests of the prompt's full blocks, one after the other: [prompt // block_tokens] of 32 bytes."""
    column = prompt_ids.astype("<u4", copy=False).tobytes()
    width = 4 * block_tokens
    digests, parent = [], root
    for start in range(0, len(column) // width * width, width):
        parent = chained_digest(parent, column[start : start + width])
        digests.append(parent)
    return b"".join(digests)
