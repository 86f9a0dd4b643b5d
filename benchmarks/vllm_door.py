"""Chats through our door and a vLLM server, against the same vLLM server alone, in turns.

For a vLLM server that is running with `--enable-lora` and the settings of docs/aws.md: TUNEYARD_VLLM_URL is its
address, TUNEYARD_VLLM_API_KEY its key, TUNEYARD_VLLM_SOURCE the folder or hub id of its base model. The goal is one for
a GPU; where vLLM computes on the same few cores as all the others, each of them takes from it.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from typing import Any

import aiohttp

from measuring import Result, stack

CROWDS, TOKENS, ROUNDS = (1, 16, 64), 64, 5


def measure() -> list[Result]:
    """Tokens a second of whole answers, the median of the rounds."""
    url, source = os.environ["TUNEYARD_VLLM_URL"], os.environ["TUNEYARD_VLLM_SOURCE"]
    with tempfile.TemporaryDirectory() as folder:
        spec = f"served/base={source},engine_url={url},engine_folder={folder}"
        with stack("--base-model", spec) as (_, told, _):
            ours = f"{told['base_url']}/v1/chat/completions", told["api_key"], "served/base"
            return asyncio.run(_measure(ours, url, os.environ["TUNEYARD_VLLM_API_KEY"]))


async def _measure(ours: tuple[str, str, str], url: str, key: str) -> list[Result]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}) as answer:
            name = (await answer.json())["data"][0]["id"]
        async with session.get(f"{url}/version") as answer:
            served = Result("vLLM", (await answer.json())["version"], name)
        ways = {"ours": ours, "alone": (f"{url}/v1/chat/completions", key, name)}
        results = [served]
        for crowd in CROWDS:
            speeds: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(ROUNDS + 1):
                for way, (address, token, model) in ways.items():
                    began = time.perf_counter()
                    asked = (_ask(session, address, token, model, one) for one in range(crowd))
                    tokens = sum(await asyncio.gather(*asked))
                    if number:
                        speeds[way].append(tokens / (time.perf_counter() - began))
            mine, alone = (statistics.median(speeds[way]) for way in ("ours", "alone"))
            results.append(Result.of(f"{crowd} at once", mine, alone, "tokens/s", ">= 0.97 on a GPU"))
        return results


async def _ask(session: aiohttp.ClientSession, url: str, key: str, model: str, number: int) -> int:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me about the number {number}."}],
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    async with session.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
        told = await answer.json()
        assert answer.status == 200, told
        return int(told["usage"]["completion_tokens"])
