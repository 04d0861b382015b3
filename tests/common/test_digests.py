"""Digests of blocks: what they are made of, and what they keep apart."""

from __future__ import annotations

import hashlib

import numpy as np

from services.common.digests import DIGEST_BYTES, chained_digest, prompt_digests, root_digest

ROOT = root_digest(tenant="", salt="", adapter="")


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, dtype=np.uint32)


def test_a_root_is_the_hash_of_three_length_prefixed_parts() -> None:
    expected = hashlib.sha256(b"R\x02\0\0\0ab\0\0\0\0\x02\0\0\0\xc3\xa9").digest()
    assert root_digest(tenant="ab", salt="", adapter="é") == expected


def test_K7_tenant_salt_and_adapter_cannot_be_taken_for_one_another() -> None:
    roots = {
        root_digest(tenant=tenant, salt=salt, adapter=adapter)
        for tenant, salt, adapter in [("X", "", ""), ("", "X", ""), ("", "", "X"), ("XX", "", ""), ("X", "X", "")]
    }
    assert len(roots) == 5


def test_a_block_is_chained_to_the_one_before_it() -> None:
    first = hashlib.sha256(b"B" + ROOT + b"\1\0\0\0\2\0\0\0").digest()
    second = hashlib.sha256(b"B" + first + b"\3\0\0\0\4\0\0\0").digest()
    assert prompt_digests(ROOT, ids(1, 2, 3, 4, 5), 2) == first + second
    assert chained_digest(first, ids(3, 4).tobytes()) == second


def test_the_same_tokens_behind_others_are_another_block() -> None:
    one, other = (prompt_digests(ROOT, ids(start, 2, 3, 4), 2) for start in (1, 9))
    assert one[DIGEST_BYTES:] != other[DIGEST_BYTES:]


def test_a_prompt_without_a_full_block_has_no_digest() -> None:
    assert prompt_digests(ROOT, ids(1, 2, 3), 4) == b""
