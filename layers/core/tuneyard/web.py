"""HTTP furniture: the application, its one error printer, pages, and bodies that may come gzipped."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal, TypeVar

from aws_lambda_powertools import Logger
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tuneyard
from tuneyard.errors import ApiError, BadRequest, TooLarge, Unavailable
from tuneyard.settings import settings

T = TypeVar("T")
logger = Logger(service="tuneyard")

Limit = Annotated[int, Query(ge=1, le=100, description="Rows of a page.")]
After = Annotated[str | None, Query(description="Start after the row with this id.")]
Order = Annotated[Literal["asc", "desc"], Query(description="Oldest first, or newest first.")]


def create_app(title: str, *routers: APIRouter) -> FastAPI:
    """An application of these routes, with our errors, gzipped bodies and size limits."""
    app = FastAPI(title=title, version=tuneyard.__version__, redirect_slashes=False)
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(ApiError, _show_api_error)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _show_invalid_request)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _show_http_exception)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _show_bug)
    app.add_middleware(UnpackedBody)
    return app


def page(rows: list[T], limit: int, show: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    """The list object of at most ``limit`` rows; ``rows`` holds one more when there are more."""
    data = [show(row) for row in rows[:limit]]
    return {
        "object": "list",
        "data": data,
        "has_more": len(rows) > limit,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
    }


def error_body(error: ApiError, detail: Any = None) -> dict[str, Any]:
    """An error as every client of ours reads it: ``detail`` for FastAPI's, ``error`` for OpenAI's and ART's."""
    told = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"detail": str(error) if detail is None else detail, "error": told}


def show_error(error: ApiError, detail: Any = None) -> JSONResponse:
    """The one printer of errors."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error, detail), status_code=error.status, headers=headers)


async def _show_api_error(_: Request, error: ApiError) -> JSONResponse:
    return show_error(error)


async def _show_invalid_request(_: Request, error: RequestValidationError) -> JSONResponse:
    found = [{"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"]} for e in error.errors()]
    if any(e["type"] == "json_invalid" for e in found):
        return show_error(
            BadRequest(f"The body is not valid JSON: {error.errors()[0]['ctx']['error']}."), found
        )
    first = found[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    told = ApiError(f"{'.'.join(path) or 'body'}: {first['msg']}", param=".".join(path) or None)
    told.status, told.code, told.type = 422, "invalid_value", "invalid_request_error"
    return show_error(told, found)


async def _show_http_exception(request: Request, error: HTTPException) -> JSONResponse:
    sentences = {
        404: f"No such path: {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }
    told = ApiError(sentences.get(error.status_code, str(error.detail)))
    told.status, told.code, told.type = error.status_code, "not_found", "invalid_request_error"
    return show_error(told)


async def _show_bug(request: Request, error: Exception) -> JSONResponse:
    logger.error("request failed", exc_info=error, method=request.method, path=request.url.path)
    return show_error(ApiError("Something went wrong on our side; it was logged. Try again, or report it."))


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is given up when the client hangs up."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.create_task(work), asyncio.create_task(hang_up())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Unavailable("The client went away before its answer was complete.", retry_after=1)
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


class UnpackedBody:
    """Middleware that unpacks gzipped bodies and refuses those over the limits before they fill the memory."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a plain body."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        packed = headers.get(b"content-encoding", b"").lower() == b"gzip"
        try:
            body = await _read(receive, packed=packed)
        except ApiError as error:
            await show_error(error)(scope, receive, send)
            return
        dropped = {b"content-encoding", b"content-length"} if packed else set()
        scope = {**scope, "headers": [(k, v) for k, v in scope["headers"] if k not in dropped]}
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self.app(scope, replay, send)


async def _read(receive: Receive, *, packed: bool) -> bytes:
    unpacker = zlib.decompressobj(wbits=31) if packed else None
    chunks: list[bytes] = []
    received = size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("The client went away before its body was complete.")
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        received += len(chunk)
        if unpacker is not None:
            try:
                chunk = unpacker.decompress(chunk, settings().max_unpacked_bytes - size + 1)
            except zlib.error as error:
                raise BadRequest(f"The body is said to be gzip and is not: {error}.") from error
        size += len(chunk)
        if received > settings().max_body_bytes or size > settings().max_unpacked_bytes:
            raise _too_large()
        chunks.append(chunk)
    if unpacker is not None and not unpacker.eof:
        raise BadRequest("The gzipped body is cut short.")
    return b"".join(chunks)


def _too_large() -> TooLarge:
    most = settings()
    return TooLarge(
        f"The body is too large: at most {most.max_body_bytes / 1e6:g} MB are taken here, "
        f"{most.max_unpacked_bytes / 1e6:g} MB unpacked. Send it with `Content-Encoding: gzip`, or upload it: "
        "POST /v1/preview/uploads answers an address to PUT it to, and a URL to name as `trajectory_groups_url` or "
        "`training_data_url`."
    )
