"""Chat completions and the model listing, in the OpenAI format."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from mangum import Mangum

from tuneyard import chat, usage, views, web
from tuneyard.auth import Caller
from tuneyard.completions import ChatRequest

router = APIRouter(prefix="/v1", tags=["Chat"])
Project = Annotated[str | None, Header(description="<team>/<project> that the usage is booked on.")]


@router.post("/chat/completions")
@router.post("/chat/completions/", include_in_schema=False)
async def create_chat_completion(
    request: Request,
    body: ChatRequest,
    caller: Caller,
    compat_project: Project = None,
    openai_project: Project = None,
) -> StreamingResponse:
    """Answer a conversation with a base model or a trained one; ``stream`` sends the tokens as they come."""
    asked = chat.complete(caller, body, project=compat_project or openai_project)
    answer = await web.while_connected(request, asked)
    return StreamingResponse(answer.body, answer.status, answer.headers, answer.media_type)


@router.get("/models")
def list_inference_models(caller: Caller) -> dict[str, Any]:
    """The models that chat accepts: base models and the team's trained ones."""
    return {"object": "list", "data": chat.listing(caller)}


@router.get("/usage")
def get_usage(
    caller: Caller,
    since: Annotated[date | None, Query(description="The first day, UTC.")] = None,
    until: Annotated[date | None, Query(description="The last day, UTC.")] = None,
    after: web.After = None,
    limit: web.Limit = 20,
) -> dict[str, Any]:
    """Tokens and seconds by day, project and model."""
    rows = usage.page(caller, since=since, until=until, after=after, limit=limit + 1)
    return web.page(rows, limit, views.usage)


app = web.create_app("Chat", router)
handler = Mangum(app, lifespan="off")
