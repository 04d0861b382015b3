"""The channel to another of the three services, with fresh certificates where their files have changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc

from services.common.server import channel_options
from services.common.tls import PeerTls

log = logging.getLogger(__name__)


class Peer:
    """Who is dialled. Raises StartError for certificate files that cannot be used."""

    def __init__(
        self, target: str, tls: PeerTls | None = None, options: Sequence[tuple[str, Any]] | None = None
    ) -> None:
        self.target = target
        self._options = [*(channel_options() if options is None else options), *(tls.options() if tls else [])]
        self._files = tls.files() if tls is not None else None
        self._channel: grpc.aio.Channel | None = None

    def channel(self) -> grpc.aio.Channel:
        """The one that is open; another where the files have changed. Calls on an earlier one go on to their end."""
        if self._files is not None and self._files.refreshed():
            log.info("certificates for %s were read again", self.target)
            self._channel = None
        if self._channel is None:  # late: it is bound to the event loop that runs now
            self._channel = self._open()
        return self._channel

    def _open(self) -> grpc.aio.Channel:
        if self._files is None:
            return grpc.aio.insecure_channel(self.target, options=self._options)
        return grpc.aio.secure_channel(self.target, self._files.value, options=self._options)

    async def close(self) -> None:
        """Ends what is open."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
