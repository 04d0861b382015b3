"""Who has asked for what beside requests: a line of the log for each call that an operator makes, refused ones too.

Those of callers who may not ask at all are counted with all that is not let in (`refusals.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from services.common.caller import identity_of
from services.common.errors import RequestError

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # of its own: whoever makes a service quiet is told of all the same


@contextmanager
def told(method: str, context: Any, what: Mapping[str, object]) -> Iterator[None]:
    """Around the call `method`, told as it ends; `what` are its further fields, read then."""

    def tell(status: str, **more: object) -> None:
        fields = {"method": method, "peer": context.peer(), **identity_of(context), "status": status, **what, **more}
        log.info("admin call", extra={"fields": fields})

    try:
        yield
    except RequestError as error:
        tell(error.code.name, reason=error.reason, error=error.message)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        tell("CANCELLED")
        raise
    except BaseException:
        tell("INTERNAL")
        raise
    else:
        tell("OK")
