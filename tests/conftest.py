"""What every test run shares: the case table, shards of the slow tests, few threads, no logs after their test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

# Two cores are shared by what a test starts; set before numpy or torch is imported here, and inherited by processes.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "2")
# Threads that spin while they wait take the core from whoever they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["tests.support.case_table", "tests.support.shards"]


@pytest.fixture(autouse=True)
def no_logs_after_their_test() -> Iterator[None]:
    """A service that a test runs in its own process sets that process's logs up, which then print over the progress."""
    yield
    from services.common.logs.delivery import Deliverer

    for handler in [handler for handler in logging.root.handlers if isinstance(handler, Deliverer)]:
        handler.flush()
        logging.root.removeHandler(handler)
