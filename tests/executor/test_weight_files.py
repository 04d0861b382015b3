"""The mapped files: what a tensor is, what memory it takes, and the hash of files while others work."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import StartError
from services.executor import weight_files
from services.executor.weight_files import Hashing, WeightFiles, _Stored
from tests.support.checkpoints import tiny_llama


def resident_file_bytes() -> int:
    """Of this process, in mapped files (proc(5), RssFile)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_those_that_safetensors_reads(tmp_path: Path, shards: int) -> None:
    path = tiny_llama(tmp_path / "m", shards=shards, dtype="bfloat16")
    expected: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        expected |= load_file(file)
    files = WeightFiles(path)
    assert set(files.names) == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(files.read(name), tensor) and files.shape(name) == tensor.shape and files.is_bfloat16(name)


@pytest.mark.parametrize("dtype", list(weight_files._DTYPES.values()), ids=str)
def test_every_dtype_and_an_empty_tensor_come_out_as_they_went_in(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = {"some": torch.arange(6).reshape(2, 3).to(dtype), "none": torch.empty(0, 4, dtype=dtype)}
    save_file(stored, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    for name, tensor in stored.items():
        assert files.read(name).dtype == dtype and torch.equal(files.read(name), tensor)
        files.release([name])
        assert torch.equal(files.read(name), tensor)


def write(file: Path, header: dict[str, object], data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_tensor_that_lies_at_an_odd_byte_is_read_all_the_same(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    for padding in range(4):  # one of the four header lengths leaves `b` aligned
        write(
            tmp_path / "model.safetensors",
            header | {"__metadata__": {"x": " " * padding}},
            b"\1" + struct.pack("<2f", 2, 3),
        )
        assert WeightFiles(tmp_path).read("b").tolist() == [2.0, 3.0]


def test_a_dtype_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": {"dtype": "F8_E5M2", "shape": [1], "data_offsets": [0, 1]}}, b"\0")
    with pytest.raises(StartError, match="holds a as F8_E5M2, served are F64, F32"):
        WeightFiles(tmp_path).read("a")


def test_what_is_read_takes_memory_until_it_is_released(tmp_path: Path) -> None:
    size = 32 << 20
    save_file({"big": torch.ones(size, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    before = resident_file_bytes()
    assert files.read("big")[: size // 4].count_nonzero() == size // 4  # a part costs a part
    assert resident_file_bytes() - before < size // 2
    assert files.read("big").count_nonzero() == size
    assert resident_file_bytes() - before > size * 0.9
    files.release(["big"])
    assert resident_file_bytes() - before < size * 0.1


def test_of_a_part_the_bytes_are_asked_for_that_it_is_made_of() -> None:
    """A row of 8,192 float32 is 32 KiB: worth a run of its own; one of 64 lies in the page of its neighbours."""
    wide, narrow = _Stored("F32", (4, 8192), 100, 100 + 4 * 32768), _Stored("F32", (4, 64), 0, 1024)
    assert list(wide.runs(0, None)) == [(100, 100 + 4 * 32768)]
    assert list(wide.runs(0, [(1, 3)])) == [(100 + 32768, 100 + 3 * 32768)]
    halves = [(100 + row * 32768 + 16384, 100 + (row + 1) * 32768) for row in range(4)]
    assert list(wide.runs(1, [(4096, 8192)])) == halves
    assert list(narrow.runs(1, [(32, 64)])) == [(0, 1024)]
    stacked = _Stored("BF16", (2, 8, 1024), 0, 2 * 8 * 2048)
    assert list(stacked.runs(1, [(0, 2), (4, 6)])) == [(0, 4096), (8192, 12288), (16384, 20480), (24576, 28672)]
    assert list(_Stored("F32", (0, 8), 5, 5).runs(0, None)) == []


def test_parts_of_a_tensor_are_those_of_the_whole(tmp_path: Path) -> None:
    tensor = torch.arange(2 * 8 * 4096, dtype=torch.float32).view(2, 8, 4096)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert torch.equal(files.read("t", 1, [(2, 4)]), tensor[:, 2:4])
    assert torch.equal(files.read("t", 1, [(0, 2), (4, 6)]), tensor[:, [0, 1, 4, 5]])
    assert torch.equal(files.read("t", 2, [(1000, 3000)]), tensor[:, :, 1000:3000])


def test_a_tensor_that_the_index_places_where_it_is_not_is_named(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", shards=2)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = next(
        name for name in index["weight_map"].values() if name != index["weight_map"]["model.norm.weight"]
    )
    file.write_text(json.dumps(index))
    with pytest.raises(StartError, match=r"lacks model\.norm\.weight, which model\.safetensors\.index\.json places"):
        WeightFiles(path)


def test_the_hash_is_over_the_files_hashes_in_order_of_name(tmp_path: Path) -> None:
    for name in "ba":
        (tmp_path / name).write_bytes(name.encode() * 3_000_000)
    hashes = "".join(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in "ab")
    with Hashing([tmp_path / "b", tmp_path / "a"], threads=2) as hashing:
        assert hashing.result() == hashlib.sha256(hashes.encode()).hexdigest()
        assert hashing.done_bytes == hashing.total_bytes == 6_000_000


def test_leaving_ends_the_hash_of_files_that_are_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must not wait for the hash of a large checkpoint."""
    (tmp_path / "large").write_bytes(bytes(8 << 20))
    begun, left = threading.Event(), threading.Event()
    plain = hashlib.sha256()

    class Held:
        def update(self, data: memoryview) -> None:
            begun.set()
            left.wait(20)
            plain.update(data)

        def hexdigest(self) -> str:
            return plain.hexdigest()

    monkeypatch.setattr(weight_files.hashlib, "sha256", Held)
    with Hashing([tmp_path / "large"], threads=1) as hashing:
        monkeypatch.setattr(hashing, "_stopped", left)  # set as the block is left
        assert begun.wait(20)
    assert 0 < hashing.done_bytes < hashing.total_bytes
