"""What every test run shares: the case table, shards of the slow tests, few threads."""

from __future__ import annotations

import os

# Two cores are shared by what a test starts; set before numpy or torch is imported here, and inherited by processes.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "2")
# Threads that spin while they wait take the core from whoever they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["tests.support.case_table", "tests.support.shards"]
