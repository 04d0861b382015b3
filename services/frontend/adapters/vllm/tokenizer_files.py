"""GetTokenizer: the text side of the checkpoint's folder, as one zip archive."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2 as pb

CHUNK_BYTES = 64 * 1024
"""Of a message; below any limit that a client may have."""

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Those of them that the folder has."""

_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # equal files, equal archives


class TokenizerFiles:
    """The archive of one folder, made when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archive: asyncio.Future[bytes] | None = None

    async def chunks(self) -> AsyncIterator[pb.GetTokenizerChunk]:
        """The archive in pieces; the last one has its SHA-256."""
        if self._archive is None:
            self._archive = asyncio.ensure_future(asyncio.to_thread(_archive, self._path))
        data = await asyncio.shield(self._archive)
        sha256 = hashlib.sha256(data).hexdigest()
        for start in range(0, len(data), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(data)
            yield pb.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=sha256 if is_last else "")


def _archive(path: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in FILES:
            if (path / name).is_file():
                entry = zipfile.ZipInfo(name, _LONG_AGO)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, (path / name).read_bytes())
    return buffer.getvalue()
