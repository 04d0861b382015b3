"""A checkpoint's safetensors files, mapped into memory: where each tensor lies, its bytes, the hash of them all.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import StartError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LISTED = 8
"""Names an error lists before it counts the rest."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_HASH_CHUNK_BYTES = 1 << 20
_CLOSE_BYTES = 4 * mmap.PAGESIZE


@dataclass(frozen=True)
class _Stored:
    """A tensor's line in its file's header; `begin` and `end` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def runs(self, dim: int, spans: Sequence[tuple[int, int]] | None) -> Iterator[tuple[int, int]]:
        """Where in the file the indices of `spans` in dimension `dim` lie; None: all of it.

        What lies closer together than pages is one run: a disk reads it whole anyway.
        """
        if self.begin == self.end:
            return
        outer, inner = math.prod(self.shape[:dim]), math.prod(self.shape[dim:])
        row_bytes = inner * (self.end - self.begin) // math.prod(self.shape)
        if spans is None or (dim and row_bytes < _CLOSE_BYTES):
            yield self.begin, self.end
            return
        index_bytes = row_bytes // self.shape[dim]
        for row in range(outer):
            start = self.begin + row * row_bytes
            for first, last in spans:
                yield start + first * index_bytes, start + last * index_bytes


class WeightFiles:
    """The tensors of a checkpoint by name. Opening reads headers alone; a tensor's pages are read when it is used.

    The map is read-only and of the file itself, so it counts against no memory limit: its pages are cache, which the
    kernel takes back when it needs to. Methods may be called by several threads.
    """

    def __init__(self, path: Path) -> None:
        """Raises StartError without safetensors files, or where one cannot be read, or lacks what the index names."""
        self._where = locate(path)
        self.paths = tuple(sorted(set(self._where.values())))
        self._files = {file: _MappedFile(file) for file in self.paths}
        for name, file in self._where.items():
            if name not in self._files[file].stored:
                raise StartError(f"{file} lacks {name}, which {INDEX_FILE} places there")

    @property
    def names(self) -> Collection[str]:
        """Of all tensors: those of the single file, or those that the index names."""
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """By the file's header."""
        return self._file(name).stored[name].shape

    def is_bfloat16(self, name: str) -> bool:
        """By the file's header."""
        return self._file(name).stored[name].dtype == "BF16"

    def place(self, name: str) -> tuple[Path, int]:
        """File and first byte: the order in which tensors are read without seeking."""
        return self._where[name], self._file(name).stored[name].begin

    def read(self, name: str, dim: int = 0, spans: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """The tensor as the file holds it, or of its dimension `dim` the indices in `spans`, (first, past the last)
        each. Not to be written: a view of the map, but for several spans. Of the file no more is read than these, to
        the page. Raises StartError for a dtype that is not served."""
        return self._file(name).view(name, dim, spans)

    def release(self, names: Iterable[str]) -> None:
        """Gives back the memory of tensors that have been read; a view of one still holds, and reads it anew."""
        for name in names:
            self._file(name).release(name)

    def _file(self, name: str) -> _MappedFile:
        return self._files[self._where[name]]


class _MappedFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="np"):  # checks that header and size belong together
                pass
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_bytes))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, SafetensorError, ValueError) as error:
            raise StartError(f"cannot read {path}: {error}") from error
        header.pop("__metadata__", None)
        start = 8 + header_bytes
        self.stored = {
            name: _Stored(entry["dtype"], tuple(entry["shape"]), *(start + offset for offset in entry["data_offsets"]))
            for name, entry in header.items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing here writes
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, name: str, dim: int, spans: Sequence[tuple[int, int]] | None) -> torch.Tensor:
        stored = self.stored[name]
        if stored.dtype not in _DTYPES:
            raise StartError(f"{self.path} holds {name} as {stored.dtype}, served are {', '.join(_DTYPES)}")
        dtype = _DTYPES[stored.dtype]
        for begin, end in stored.runs(dim, spans):
            aligned = begin - begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, aligned, end - aligned)
        data = self._bytes[stored.begin : stored.end]
        if stored.begin % dtype.itemsize:  # of files older than the format's rule of alignment
            data = data.clone()
        whole = data.view(dtype).view(stored.shape)
        if spans is None:
            return whole
        parts = [whole.narrow(dim, begin, end - begin) for begin, end in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def release(self, name: str) -> None:
        stored = self.stored[name]
        begin = stored.begin - stored.begin % mmap.PAGESIZE
        if stored.begin < stored.end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, stored.end - begin)


class Hashing:
    """The hash of files, computed in threads of its own while others work: `with Hashing(files, threads) as hashing`.

    Leaving the block ends it, done or not.
    """

    def __init__(self, files: Sequence[Path], threads: int) -> None:
        """A thread a file, `threads` at most."""
        self.total_bytes = sum(file.stat().st_size for file in files)
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=max(1, min(threads, len(files))), thread_name_prefix="hash")
        ordered = sorted(files, key=lambda file: file.name)
        self._digests: list[Future[str]] = [self._pool.submit(self._digest, file) for file in ordered]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    @property
    def done_bytes(self) -> int:
        """Hashed so far."""
        return self._done_bytes

    def result(self, timeout_s: float | None = None) -> str:
        """SHA-256, hex, over the concatenated hex SHA-256 of each file, files in order of their names.

        Raises TimeoutError where it takes longer than `timeout_s`, StartError for a file that cannot be read.
        """
        whole = hashlib.sha256()
        for digest in self._digests:
            whole.update(digest.result(timeout_s).encode())
        return whole.hexdigest()

    def _digest(self, file: Path) -> str:
        digest, chunk = hashlib.sha256(), bytearray(_HASH_CHUNK_BYTES)
        try:
            with file.open("rb", buffering=0) as opened:
                while not self._stopped.is_set() and (count := opened.readinto(chunk)):
                    digest.update(memoryview(chunk)[:count])
                    with self._lock:
                        self._done_bytes += count
        except OSError as error:
            raise StartError(f"cannot read {file}: {error}") from error
        return digest.hexdigest()


def locate(path: Path) -> dict[str, Path]:
    """File of each tensor: what the single file holds, else what the index says. Raises StartError."""
    if (path / SINGLE_FILE).is_file():
        return dict.fromkeys(_names(path / SINGLE_FILE), path / SINGLE_FILE)
    if not (path / INDEX_FILE).is_file():
        raise StartError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights are read from safetensors alone")
    try:
        weight_map = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        where = {str(name): path / Path(file).name for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartError(f"{path / INDEX_FILE} holds no weight_map of tensor names to files") from error
    if missing := sorted({file.name for file in where.values() if not file.is_file()}):
        raise StartError(f"{path} lacks {enumerated(missing)}, which {INDEX_FILE} names")
    return where


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="np") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise StartError(f"cannot read {file}: {error}") from error


def enumerated(names: Sequence[str]) -> str:
    """The first of them, and how many there are beside."""
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
