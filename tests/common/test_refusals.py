"""Calls that were not let in: the log counts each, and nobody fills it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from services.common.caller import CALLER, Identity
from services.common.errors import RequestError
from services.common.guard import denied, unauthenticated
from services.common.refusals import Refusals
from services.frontend.quotas import Quota, Quotas


class Call:
    """A context with a token in its metadata."""

    def peer(self) -> str:
        return "ipv4:10.0.0.9:1234"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", "Bearer secret-token"),)


def over_quota() -> RequestError:
    quotas = Quotas(Quota(max_requests=0))
    with pytest.raises(RequestError) as refused, quotas.entered("acme"):
        pass
    return refused.value


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return record.fields  # type: ignore[attr-defined,no-any-return]


async def test_a_flood_is_two_lines_that_count_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refusals = Refusals(interval_s=0.2)
    for number in range(1000):
        error = unauthenticated("NO_TOKEN", "a token is needed") if number % 2 else denied("OTHER_TENANT", "another's")
        refusals.note("/a.B/C", Call(), error)
    assert len(caplog.records) == 1
    await asyncio.sleep(0.4)
    first, rest = caplog.records
    assert fields(first)["calls"] == 1 and fields(rest)["calls"] == 999
    assert fields(rest)["reasons"] == {"NO_TOKEN": 500, "OTHER_TENANT": 499}
    assert (fields(rest)["method"], fields(rest)["peer"]) == ("a.B/C", "ipv4:10.0.0.9:1234")
    assert "secret-token" not in repr([record.__dict__ for record in caplog.records])
    await asyncio.sleep(0.3)
    refusals.note("/a.B/C", Call(), denied("OTHER_TENANT", "another's"))
    assert len(caplog.records) == 3  # after a quiet interval the next is told at once
    refusals.close()
    assert len(caplog.records) == 3


async def test_what_has_not_been_told_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refusals = Refusals(interval_s=60)
    for _ in range(3):
        refusals.note("/a.B/C", Call(), denied("OTHER_TENANT", "another's"))
    refusals.close()
    assert [fields(record)["calls"] for record in caplog.records] == [1, 2]


async def test_a_tenant_over_its_quota_is_named_and_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    CALLER.set(Identity("acme"))
    refusals = Refusals(interval_s=60)
    refusals.note("/a.B/C", Call(), over_quota())
    refusals.note("/a.B/C", Call(), over_quota())
    refusals.note("/a.B/C", Call(), denied("OTHER_TENANT", "another's"))
    refusals.close()
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    assert all(fields(record)["identity"] == "acme" for record in caplog.records)
