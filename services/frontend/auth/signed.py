"""Bearer tokens that an issuer has signed: JSON Web Tokens (RFC 7519), checked as RFC 8725 advises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jwt

from services.common.caller import ROLES, Identity
from services.common.errors import RequestError
from services.common.guard import unauthenticated
from services.frontend.auth import key_set
from services.frontend.auth.bearer import bearer_token
from services.frontend.tenant import MAX_BYTES


@dataclass(frozen=True)
class Claims:
    """What a token must have, and where its tenant and roles stand."""

    issuer: str
    audience: str
    algorithms: Sequence[str]
    tenant: str = "sub"
    roles: str = "roles"
    leeway_s: float = 30.0


class SignedTokens:
    """Of one issuer."""

    def __init__(self, claims: Claims, keys: key_set.FileKeys | key_set.FetchedKeys) -> None:
        self._claims = claims
        self._keys = keys

    async def identify(self, context: Any) -> Identity:
        """Raises UNAUTHENTICATED."""
        token = bearer_token(context)
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            raise unauthenticated("NOT_A_JWT", "the token is no JWT") from None
        if header.get("alg") not in self._claims.algorithms:  # before any key: the token does not choose the method
            raise unauthenticated(
                "WRONG_ALGORITHM", f"the token's algorithm is not among {', '.join(self._claims.algorithms)}"
            )
        key = await self._keys.find(header.get("kid"))
        if key is None:
            raise unauthenticated("UNKNOWN_KEY", "the issuer has no key of the token's key id")
        return self._identity(self._checked(token, key))

    def _checked(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        claims = self._claims
        try:
            return dict(
                jwt.decode(
                    token,
                    key,
                    algorithms=list(claims.algorithms),
                    audience=claims.audience,
                    issuer=claims.issuer,
                    leeway=claims.leeway_s,
                    options={"require": ["exp", "iss", "aud", claims.tenant]},
                )
            )
        except jwt.PyJWTError as error:
            raise _refusal(error) from None

    def _identity(self, claims: dict[str, Any]) -> Identity:
        tenant, roles = claims[self._claims.tenant], claims.get(self._claims.roles, [])
        if not isinstance(tenant, str) or not tenant or len(tenant) > MAX_BYTES or not _printable(tenant):
            raise unauthenticated(
                "NO_TENANT", f"the claim {self._claims.tenant} must be 1 to {MAX_BYTES} bytes of printable ASCII"
            )
        listed = roles.split() if isinstance(roles, str) else roles
        known = {role for role in listed if role in ROLES} if isinstance(listed, list) else set()
        return Identity(tenant, frozenset(known))


def _printable(text: str) -> bool:
    return all(" " <= character <= "~" for character in text)


def _refusal(error: jwt.PyJWTError) -> RequestError:
    """Which check failed; what was expected is not told."""
    kinds: list[tuple[type[jwt.PyJWTError], str, str]] = [
        (jwt.ExpiredSignatureError, "TOKEN_EXPIRED", "the token has expired; get another"),
        (jwt.ImmatureSignatureError, "TOKEN_NOT_YET", "the token is not valid yet; look at the clocks"),
        (jwt.InvalidAudienceError, "WRONG_AUDIENCE", "the token is for another audience"),
        (jwt.InvalidIssuerError, "WRONG_ISSUER", "the token is of another issuer"),
        (jwt.MissingRequiredClaimError, "CLAIM_MISSING", f"{error}"),
    ]
    for kind, reason, message in kinds:
        if isinstance(error, kind):
            return unauthenticated(reason, message)
    return unauthenticated("WRONG_SIGNATURE", "the token's signature does not hold")
