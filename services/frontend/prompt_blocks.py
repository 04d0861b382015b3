"""The names under which the engine may find a prompt's KV blocks in its cache."""

from __future__ import annotations

import numpy as np

from services.common.digests import prompt_digests, root_digest
from services.frontend.engine import BlockDigests
from services.frontend.request import Job
from services.frontend.tokenizer import off_loop

_ID_BYTES = 4


async def block_digests(job: Job, tenant: str) -> BlockDigests | None:
    """Digests of the prompt's full blocks, off the event loop where it is long; None for an engine without blocks.

    Requests share blocks within a tenant and a salt.
    """
    block_tokens = job.engine.block_tokens
    if block_tokens == 0:
        return None

    def digest() -> BlockDigests:
        root = root_digest(tenant=tenant, salt=job.options.cache_salt, adapter="")
        return BlockDigests(root, prompt_digests(root, np.array(job.prompt_ids, np.uint32), block_tokens))

    return await off_loop(len(job.prompt_ids) * _ID_BYTES, digest)
