"""The door of the public API: who calls, whether it may, and whether it has asked for too much."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

from services.common.caller import ADMIN, CALLER, Identity
from services.common.guard import Admission, denied
from services.frontend.config import FrontendConfig
from services.frontend.quotas import Quotas
from services.frontend.tenant import tenant_of

OPEN_METHODS = frozenset({"/vllm.grpc.engine.VllmEngine/HealthCheck"})
"""As open as grpc.health.v1: a gateway asks it before it sends anybody's request."""

ADMIN_METHODS = frozenset({"/vllm.grpc.engine.VllmEngine/FlushCache", "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"})

ADMIN_SERVICE = "/triptych.engine.v1.AdminService/"


class Method(Protocol):
    """A way of knowing callers."""

    async def identify(self, context: Any) -> Identity:
        """Raises UNAUTHENTICATED or PERMISSION_DENIED."""


class Door:
    """Lets calls in; without a method nobody is known, and `Quotas` go by what callers call themselves."""

    def __init__(self, method: Method | None, quotas: Quotas) -> None:
        self._method = method
        self._quotas = quotas

    async def admit(self, name: str, context: Any) -> AbstractContextManager[Any]:
        """Raises RequestError; UNAUTHENTICATED, PERMISSION_DENIED, RESOURCE_EXHAUSTED."""
        CALLER.set(None)  # of this call's task
        if name in OPEN_METHODS:
            return nullcontext()
        if self._method is not None:
            identity = await self._method.identify(context)
            CALLER.set(identity)
            if ADMIN not in identity.roles and (name in ADMIN_METHODS or name.startswith(ADMIN_SERVICE)):
                raise denied("ADMIN_ONLY", f"{name.rpartition('/')[2]} needs the role {ADMIN}")
        stack = ExitStack()
        tenant = tenant_of(context)
        if self._quotas.is_set:
            stack.enter_context(self._quotas.entered(tenant))
        # A call that has ended may hold its handler up for a while, at a message that nobody takes.
        context.add_done_callback(lambda _: stack.close())
        return stack


def method_of(config: FrontendConfig) -> Method | None:
    """What `auth` names. Raises StartError."""
    if config.auth == "tokens" and config.auth_tokens is not None:
        from services.frontend.auth.listed import Tokens

        return Tokens(config.auth_tokens)
    if config.auth == "mtls":
        from services.frontend.auth.certificates import Certificates

        return Certificates(config.auth_names, config.admin_names)
    if config.auth == "jwt" and config.jwt_keys is not None:
        from services.frontend.auth import key_set
        from services.frontend.auth.signed import Claims, SignedTokens

        claims = Claims(
            issuer=config.jwt_issuer or "",
            audience=config.jwt_audience or "",
            algorithms=config.jwt_algorithms,
            tenant=config.jwt_tenant_claim,
            roles=config.jwt_roles_claim,
            leeway_s=config.jwt_leeway_s,
        )
        return SignedTokens(claims, key_set.of(config.jwt_keys))
    return None


def admission(config: FrontendConfig, quotas: Quotas) -> Admission | None:
    """None where every call is let in. Raises StartError."""
    method = method_of(config)
    return Door(method, quotas).admit if method is not None or quotas.is_set else None
