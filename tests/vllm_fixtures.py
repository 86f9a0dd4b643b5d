"""A stand-in for vLLM's OpenAI server: its routes, bodies and errors as its source publishes them, and a toy model.

Follows ``vllm/entrypoints/openai/chat_completion`` and ``.../models`` at the commits that docs/decisions/0006 names.
What it takes is as narrow as there: an unknown model, an empty list of tools or an adapter loaded twice is refused.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from safetensors import SafetensorError
from safetensors.torch import load

KEY, BASE, CONTEXT = "vllm-key", "served/base", 64
WORDS = ["so", "it", "is", "what", "it", "was", "and", "will", "be"]
TOKENIZED = {
    "model", "messages", "tools", "add_generation_prompt", "add_special_tokens", "continue_final_message",
    "return_token_strs", "chat_template", "chat_template_kwargs", "mm_processor_kwargs",
}  # fmt: skip
UNKNOWN_TO_VLLM = {"audio", "best_of", "functions", "guided_json", "user", "web_search_options"}


class FakeVllm:
    """Its state, and what it was asked."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.log: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.aborted = 0
        self.runtime_loading = True
        self.pause = 0.0
        self.most_at_once = 0
        self.app = _app(self)

    def card(self, name: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": CONTEXT,
        }


def refused(
    status: int, message: str, kind: str = "BadRequestError", param: str | None = None
) -> JSONResponse:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status)


def _app(fake: FakeVllm) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def authenticate(request: Request, call_next: Any) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        response: Response = await call_next(request)
        return response

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        adapters = [fake.card(name, BASE) for name in fake.loaded]
        return {"object": "list", "data": [fake.card(BASE, None), *adapters]}

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: dict[str, Any]) -> Response:
        if not fake.runtime_loading:
            return JSONResponse({"detail": "Not Found"}, 404)
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in fake.loaded:
            return refused(400, f"The lora adapter '{name}' has already been loaded. If you want to load the adapter "
                           "in place, set 'load_inplace' to True.", "InvalidUserInput")  # fmt: skip
        if not folder.is_dir():
            return refused(404, f"No adapter found for {folder}", "NotFoundError")
        try:
            json.loads((folder / "adapter_config.json").read_bytes())
            load((folder / "adapter_model.safetensors").read_bytes())
        except (ValueError, SafetensorError) as error:
            return refused(500, str(error), "InternalServerError")
        fake.loaded[name] = str(folder)
        fake.most_at_once = max(fake.most_at_once, len(fake.loaded))
        fake.log.append(f"load {name}")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: dict[str, Any]) -> Response:
        name = body["lora_name"]
        if fake.loaded.pop(name, None) is None:
            return refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        fake.log.append(f"unload {name}")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: dict[str, Any]) -> Response:
        fake.bodies.append(body)
        assert not UNKNOWN_TO_VLLM & body.keys(), "vLLM would drop this in silence"
        if body["model"] != BASE and body["model"] not in fake.loaded:
            return refused(404, f"The model `{body['model']}` does not exist.", "NotFoundError", "model")
        if body.get("tools") == []:
            return refused(400, "`tools` must not be an empty array.", param="tools")
        if body.get("stream_options") and not body.get("stream"):
            return refused(
                400, "Stream options can only be defined when `stream=True`.", param="stream_options"
            )
        said = body["messages"][-1]["content"]
        read = len(said.split())
        if read > CONTEXT:
            return refused(400, f"This model's maximum context length is {CONTEXT} tokens. However, you requested 0 "
                           f"output tokens and your prompt contains at least {read} input tokens.", param="input_tokens")  # fmt: skip
        if said == "busy":
            return refused(429, "Too many requests", "TooManyRequests")
        if said == "refuse":
            return refused(400, "temperature must be non-negative", param="temperature")
        if body.get("stream"):
            return StreamingResponse(_stream(fake, body, read), media_type="text/event-stream")
        await asyncio.sleep(fake.pause * len(_tokens(body, 0)))
        return JSONResponse(_whole(body, read))

    @app.post("/tokenize")
    async def tokenize(body: dict[str, Any]) -> Response:
        if body["model"] != BASE and body["model"] not in fake.loaded:
            return refused(404, f"The model `{body['model']}` does not exist.", "NotFoundError", "model")
        assert body.keys() <= TOKENIZED, "vLLM would drop this in silence"
        read = len(body["messages"][-1]["content"].split())
        told = {"count": read, "max_model_len": CONTEXT, "tokens": list(range(read)), "token_strs": None}
        return JSONResponse(told)

    return app


def _tokens(body: dict[str, Any], choice: int) -> list[int]:
    """Which words are said: it depends on the model and the choice, so that answers can be told apart."""
    most = body.get("max_completion_tokens") or body.get("max_tokens") or 5
    start = sum(body["model"].encode()) + choice
    return [(start + n) % len(WORDS) for n in range(most)]


def _choice(body: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    """What is told of tokens, in an answer and in a chunk alike."""
    as_ids = body.get("return_tokens_as_token_ids")
    content = [
        {
            "token": f"token_id:{t}" if as_ids else WORDS[t],
            "logprob": -0.5,
            "bytes": list(WORDS[t].encode()),
            "top_logprobs": [],
        }
        for t in tokens
    ]
    return {
        "logprobs": {"content": content} if body.get("logprobs") else None,
        "token_ids": tokens if body.get("return_token_ids") else None,
    }


def _whole(body: dict[str, Any], read: int) -> dict[str, Any]:
    choices = []
    for i in range(body["n"]):
        tokens = _tokens(body, i)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": " ".join(WORDS[t] for t in tokens),
            "refusal": None,
        }
        if isinstance(body.get("tool_choice"), dict):
            name = body["tool_choice"]["function"]["name"]
            call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": "{}"}}
            message |= {"content": "", "tool_calls": [call]}
        finish = "stop" if "tool_calls" in message else "length"
        choices.append({"index": i, "message": message, "finish_reason": finish, "stop_reason": None, "routed_experts": None}
                       | _choice(body, tokens))  # fmt: skip
    written = sum(len(_tokens(body, i)) for i in range(body["n"]))
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    prompt = list(range(read)) if body.get("return_token_ids") else None
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": choices,
            "usage": usage, "prompt_token_ids": prompt, "kv_transfer_params": None, "service_tier": None}  # fmt: skip


async def _stream(fake: FakeVllm, body: dict[str, Any], read: int) -> AsyncIterator[str]:
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    running = (body.get("stream_options") or {}).get("continuous_usage_stats")

    def event(index: int, written: int, **choice: Any) -> str:
        told = {k: v for k, v in {"index": index, **choice}.items() if v is not None}
        usage = {
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        }
        return f"data: {json.dumps(frame | {'choices': [told]} | (usage if running else {}))}\n\n"

    ended = False
    try:
        count = range(body["n"])
        for i in count:
            yield event(i, 0, delta={"role": "assistant", "content": ""})
        tokens = [_tokens(body, i) for i in count]
        for at in range(len(tokens[0])):
            if body["messages"][-1]["content"] == "break" and at == 2:
                error = {
                    "message": "EngineCore died",
                    "type": "InternalServerError",
                    "param": None,
                    "code": 500,
                }
                yield f"data: {json.dumps({'error': error})}\n\n"
                break
            await asyncio.sleep(fake.pause)
            for i in count:
                last = at + 1 == len(tokens[i])
                text = ("" if at == 0 else " ") + WORDS[tokens[i][at]]
                text = "x" * 300_000 if body["messages"][-1]["content"] == "long" else text
                told = _choice(body, tokens[i][at : at + 1])
                yield event(
                    i, at + 1, delta={"content": text}, finish_reason="length" if last else None, **told
                )
        else:
            written = sum(map(len, tokens))
            usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
            yield f"data: {json.dumps(frame | {'choices': [], 'usage': usage})}\n\n"
        ended = True
        yield "data: [DONE]\n\n"
    finally:
        fake.aborted += not ended


@contextmanager
def on_a_socket(app: FastAPI) -> Iterator[str]:
    """The app on a free port of this machine; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
