"""Limits come from the cgroup, v1 or v2, wherever in its tree they stand; the host's totals are only a ceiling."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.errors import StartError
from services.executor import memory

GIB = 1 << 30
HOST_CPUS = len(os.sched_getaffinity(0))


def tree(root: Path, proc_cgroup: str, files: dict[str, str], host_kib: int = 100 * GIB // 1024) -> memory.Hierarchy:
    """A /proc and a /sys/fs/cgroup made of files."""
    at = memory.Hierarchy(root / "proc", root / "cgroup")
    for name, text in {"meminfo": f"MemTotal: 1 kB\nMemAvailable: {host_kib} kB\n", "self/cgroup": proc_cgroup}.items():
        (at.proc / name).parent.mkdir(parents=True, exist_ok=True)
        (at.proc / name).write_text(text)
    for name, text in files.items():
        (at.cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (at.cgroup / name).write_text(text)
    return at


def test_version_2_takes_the_least_of_all_enclosing_groups(tmp_path: Path) -> None:
    at = tree(
        tmp_path,
        "0::/pods/mine\n",
        {
            "pods/mine/memory.max": "max\n",
            "pods/mine/memory.current": f"{GIB}\n",
            "pods/memory.max": f"{8 * GIB}\n",
            "pods/memory.current": f"{3 * GIB}\n",
            "pods/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert memory.available_bytes(at) == 6 * GIB  # 8 - (3 - 1 that is page cache)


def test_version_1_reads_the_memory_controllers_tree(tmp_path: Path) -> None:
    at = tree(
        tmp_path,
        "4:memory:/mine\n1:cpu,cpuacct:/other\n0::/\n",
        {
            "memory/mine/memory.limit_in_bytes": f"{4 * GIB}\n",
            "memory/mine/memory.usage_in_bytes": f"{GIB}\n",
            "memory/mine/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    assert memory.available_bytes(at) == 4 * GIB - GIB // 2


def test_a_container_sees_its_own_group_as_the_mounts_root(tmp_path: Path) -> None:
    files = {"memory.max": f"{2 * GIB}\n", "memory.current": f"{GIB}\n"}
    assert memory.available_bytes(tree(tmp_path, "0::/docker/abc\n", files)) == GIB


def test_the_hosts_free_memory_is_a_ceiling(tmp_path: Path) -> None:
    files = {"memory.max": f"{20 * GIB}\n", "memory.current": "0\n"}
    assert memory.available_bytes(tree(tmp_path, "0::/\n", files, host_kib=GIB // 1024)) == GIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}
    assert memory.available_bytes(tree(tmp_path, "0::/\n", files)) == 0


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({"cpu.max": "max 100000\n"}, HOST_CPUS),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "190000 100000\n"}, min(HOST_CPUS, 1)),
        ({"cpu.max": "200000 100000\n"}, min(HOST_CPUS, 2)),
        ({"cpu.max": f"{10_000 * 100_000} 100000\n"}, HOST_CPUS),
        ({}, HOST_CPUS),
    ],
)
def test_version_2_cpu_quotas_round_down_to_at_least_one(tmp_path: Path, files: dict[str, str], granted: int) -> None:
    assert memory.cpus(tree(tmp_path, "0::/\n", files)) == granted


@pytest.mark.parametrize(("quota", "granted"), [("-1", HOST_CPUS), ("100000", 1)])
def test_version_1_cpu_quotas(tmp_path: Path, quota: str, granted: int) -> None:
    files = {"cpu,cpuacct/cpu.cfs_quota_us": quota, "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    at = tree(tmp_path, "1:cpu,cpuacct:/\n", files)
    (at.cgroup / "cpu").symlink_to(at.cgroup / "cpu,cpuacct")  # as on every host with v1
    assert memory.cpus(at) == granted


@pytest.mark.parametrize("version", [1, 2])
def test_threads_left_are_the_least_of_all_enclosing_groups(version: int, tmp_path: Path) -> None:
    groups, root = ("8:pids:/pods/mine\n", "pids/") if version == 1 else ("0::/pods/mine\n", "")
    files = {
        f"{root}pods/mine/pids.max": "100\n",
        f"{root}pods/mine/pids.current": "30\n",
        f"{root}pods/pids.max": "1000\n",
        f"{root}pods/pids.current": "960\n",
    }
    assert memory.threads_left(tree(tmp_path, groups, files)) == 40


@pytest.mark.parametrize(("limit", "used", "left"), [("max", "30", None), ("20", "30", 0), (None, None, None)])
def test_threads_without_a_limit_and_over_it(
    limit: str | None, used: str | None, left: int | None, tmp_path: Path
) -> None:
    files = {"pids.max": limit, "pids.current": used}
    at = tree(tmp_path, "0::/\n", {name: text for name, text in files.items() if text is not None})
    assert memory.threads_left(at) == left


def test_this_machine_has_memory_and_cpus() -> None:
    assert memory.available_bytes() > 0
    assert 1 <= memory.cpus() <= HOST_CPUS


def test_kv_gets_its_share_or_what_is_asked_and_never_more_than_there_is() -> None:
    assert memory.kv_budget_bytes(None, 10 * GIB) == 5 * GIB
    assert memory.kv_budget_bytes(3 * GIB, 3 * GIB) == 3 * GIB
    with pytest.raises(StartError, match=f"--kv-memory-bytes is {3 * GIB}, but {GIB} bytes are left"):
        memory.kv_budget_bytes(3 * GIB, GIB)


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> memory.Hierarchy:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    return tree(tmp_path, "0::/\n", {})


@pytest.mark.parametrize(
    ("environ", "count", "reason"),
    [
        ({}, 4, "the CPUs that the cgroup grants"),
        ({"OMP_NUM_THREADS": "3"}, 3, "OMP_NUM_THREADS is 3"),
        ({"OMP_NUM_THREADS": "2,1"}, 2, "OMP_NUM_THREADS is 2"),
        ({"OMP_NUM_THREADS": "3", "NUMBA_NUM_THREADS": "1"}, 1, "NUMBA_NUM_THREADS is 1"),
        ({"OMP_NUM_THREADS": "4096", "NUMBA_NUM_THREADS": "none"}, 4, "the CPUs that the cgroup grants"),
    ],
)
def test_threads_that_nobody_asks_for_are_the_cpus_or_fewer_by_the_environment(
    environ: dict[str, str], count: int, reason: str, four_cpus: memory.Hierarchy
) -> None:
    assert memory.compute_threads(None, environ, four_cpus) == memory.Threads(count, reason)


def test_threads_that_are_asked_for_win_and_are_refused_where_there_are_none(four_cpus: memory.Hierarchy) -> None:
    assert memory.compute_threads(4, {"OMP_NUM_THREADS": "1"}, four_cpus).count == 4
    with pytest.raises(StartError, match="--threads is 5, this process may run on 4 CPUs; ask for 4 or fewer"):
        memory.compute_threads(5, {}, four_cpus)
    with pytest.raises(StartError, match="--threads is 4, but NUMBA_NUM_THREADS is 3; raise that, or unset it"):
        memory.compute_threads(4, {"NUMBA_NUM_THREADS": "3"}, four_cpus)
