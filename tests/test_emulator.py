"""What the local stack adds to the emulator's queues."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from ministack import app as ministack
from ministack.services import sqs

from tuneyard_host.local.emulator import Bell, Guarded


class Deaf(Bell):
    """A bell that nothing but its ringing ends the wait for."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds + 60)


class Unsaved:
    """No snapshots."""

    failures = 0

    def changed(self) -> None:
        pass


@pytest.mark.parametrize("send", ["SendMessage", "SendMessageBatch"])
def test_a_long_poll_ends_when_a_message_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, send: str):
    snapshots: Any = Unsaved()
    snapshots.folder = tmp_path

    async def talk() -> list[Any]:
        bell = Deaf()
        monkeypatch.setattr(sqs, "asyncio", bell)
        transport = httpx.ASGITransport(Guarded(ministack.app, snapshots, bell))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:

            async def call(operation: str, **body: Any) -> Any:
                headers = {
                    "X-Amz-Target": f"AmazonSQS.{operation}",
                    "Content-Type": "application/x-amz-json-1.0",
                }
                answer = await client.post("/", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                return answer.json()

            url = (await call("CreateQueue", QueueName=f"q-{send}"))["QueueUrl"]
            poll = asyncio.create_task(call("ReceiveMessage", QueueUrl=url, WaitTimeSeconds=20))
            await asyncio.sleep(0.1)
            body = (
                {"MessageBody": "m"}
                if send == "SendMessage"
                else {"Entries": [{"Id": "0", "MessageBody": "m"}]}
            )
            await call(send, QueueUrl=url, **body)
            async with asyncio.timeout(10):
                found: list[Any] = (await poll)["Messages"]
            return found

    assert [message["Body"] for message in asyncio.run(talk())] == ["m"]
