"""How a receiver can tell that a request is ours: two signatures over the exact bytes that we send.

``X-Service-Signature`` is hexadecimal HMAC-SHA256 of the body. ``webhook-signature`` is that of Standard Webhooks,
over id, time and body, so that a request cannot be repeated later; it holds one signature for each key that counts.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

PREFIX = "whsec_"


def hexadecimal(secret: str, body: bytes) -> str:
    """HMAC-SHA256 of the body, keyed with the bytes of the stored secret as they are."""
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def standard(secrets: list[str], *, id: str, timestamp: int, body: bytes) -> str:
    """The value of ``webhook-signature``: a signature for each secret, the newest first."""
    content = f"{id}.{timestamp}.".encode() + body
    found = [hmac.new(standard_key(secret), content, hashlib.sha256).digest() for secret in secrets]
    return " ".join(f"v1,{base64.b64encode(signature).decode()}" for signature in found)


def standard_key(secret: str) -> bytes:
    """The key that a Standard Webhooks library uses: ``whsec_`` secrets are base64, others are taken as they are."""
    if secret.startswith(PREFIX):
        return base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    return secret.encode()


def pasteable(secret: str) -> str:
    """The secret as a Standard Webhooks library takes it: those decode base64 even where there is none."""
    return PREFIX + base64.b64encode(standard_key(secret)).decode()


def is_sound(secret: str) -> bool:
    """Whether a secret that says it is ``whsec_`` can be decoded; any other text is a secret as it is."""
    try:
        return bool(standard_key(secret))
    except (binascii.Error, ValueError):
        return False


def headers(
    secrets: list[str], *, id: str, timestamp: int, body: bytes, previous: str | None
) -> list[tuple[str, str]]:
    """The headers that identify a request, and with a secret prove it; ``previous`` is the key that goes out of use."""
    found = [("webhook-id", id), ("webhook-timestamp", str(timestamp))]
    if secrets:
        found.append(("X-Service-Signature", hexadecimal(secrets[0], body)))
        if previous is not None:
            found.append(("X-Service-Signature-Previous", hexadecimal(previous, body)))
        found.append(("webhook-signature", standard(secrets, id=id, timestamp=timestamp, body=body)))
    return found
