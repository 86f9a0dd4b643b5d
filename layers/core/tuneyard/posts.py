"""One request to a webhook's endpoint: body and headers, the call through the guard, and an answer without secrets."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import NamedTuple
from urllib.parse import quote

import tuneyard
from tuneyard import outbound, payloads, signatures, vault
from tuneyard.records import ArtifactEvent
from tuneyard.settings import settings
from tuneyard.webhook_records import Answer, Outcome, Webhook

KEPT_BYTES = 4096
_KEPT_HEADERS, _KEPT_HEADER_CHARACTERS = 50, 512


class Credentials(NamedTuple):
    """What proves who we are: the access token, and the keys that sign, the newest first."""

    token: str | None
    keys: list[str]

    def texts(self) -> list[str]:
        """Every secret text."""
        return [*([self.token] if self.token else []), *self.keys]


class Message(NamedTuple):
    """What is sent: the id that stays the same however often it is sent, the number of the attempt, the content."""

    id: str
    attempt: int
    event: ArtifactEvent
    template: str | None
    values: dict[str, str]


def send(webhook: Webhook, message: Message, *, now: int) -> Answer:
    """POST a message to the endpoint as it is configured now; Unrenderable when there is no body to be made of it.

    Without a credential that is configured nothing is sent: a request must never go out unsigned.
    """
    try:
        known = _credentials(webhook, now)
    except vault.Unreadable as error:
        told = f"A configured secret could not be read ({error}), so nothing was sent."
        return Answer(outcome=Outcome.CREDENTIALS, error=told)
    secrets = {}
    if webhook.access_token and known.token is not None:
        secrets[payloads.ACCESS_TOKEN] = known.token
    if webhook.secret:
        secrets[webhook.secret] = known.keys[0]
    body = payloads.render(message.template, message.event, message.values, secrets)
    headers = _headers(known, message, body, now=now)
    answer = outbound.post(webhook.url, headers=headers, body=body, seconds=settings().webhook_seconds)
    return masked(answer, known.texts())


def masked(answer: Answer, secrets: list[str]) -> Answer:
    """The head of an answer without the secrets, whichever way the endpoint wrote them down.

    The error too: it quotes a line of the answer that cannot be read.
    """
    forms = {form for secret in secrets for form in _forms(secret)}
    ordered = sorted(forms, key=len, reverse=True)

    def clean(text: str) -> str:
        for form in ordered:
            text = text.replace(form, payloads.MASK)
        return text

    body = answer.body
    for form in ordered:
        body = body.replace(form.encode(), payloads.MASK.encode())
    return answer.model_copy(
        update={
            "headers": [
                (clean(name)[:_KEPT_HEADER_CHARACTERS], clean(value)[:_KEPT_HEADER_CHARACTERS])
                for name, value in answer.headers[:_KEPT_HEADERS]
            ],
            "body": body[:KEPT_BYTES],
            "error": None if answer.error is None else clean(answer.error),
        }
    )


def _headers(known: Credentials, message: Message, body: bytes, *, now: int) -> list[tuple[str, str]]:
    headers = [
        ("Content-Type", "application/json"),
        ("User-Agent", f"Tuneyard-Webhooks/{tuneyard.__version__}"),
        ("Accept", "*/*"),
        ("Accept-Encoding", "identity"),
        ("X-Service-Event", message.event.type.value),
        ("X-Service-Attempt", str(message.attempt)),
    ]
    if known.token is not None:
        headers.append(("Authorization", f"Bearer {known.token}"))
    previous = known.keys[1] if len(known.keys) > 1 else None
    return headers + signatures.headers(
        known.keys, id=message.id, timestamp=now // 1000, body=body, previous=previous
    )


def _credentials(webhook: Webhook, now: int) -> Credentials:
    token = vault.read(webhook.team, webhook.access_token_id) if webhook.access_token_id else None
    key = vault.read(webhook.team, webhook.secret_id) if webhook.secret_id else None
    keys = key.values(now) if key else []
    if key and webhook.previous_secret_id and now < (webhook.previous_until or 0):
        with contextlib.suppress(vault.Unreadable):
            keys.append(vault.read(webhook.team, webhook.previous_secret_id).value)
    return Credentials(token.value if token else None, keys)


def _forms(secret: str) -> set[str]:
    """A secret as an endpoint may echo it: as it is, without its prefix, in JSON, in a URL, in base64."""
    return {
        secret,
        secret.removeprefix("whsec_"),
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        quote(secret),
        quote(secret, safe=""),
        base64.b64encode(secret.encode()).decode(),
    }
