"""Is the service there, and are its parts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from mangum import Mangum

import tuneyard
from tuneyard import checks, web

router = APIRouter(prefix="/v1", tags=["Health"])


@router.get("/health", operation_id="health_check_v1_health_get")
async def health_check() -> dict[str, Any]:
    """Answer, and touch nothing."""
    return {"status": "ok", "version": tuneyard.__version__}


@router.get("/system-check")
def system_check() -> JSONResponse:
    """Look at every part; 503 when one of them fails."""
    healthy, found = checks.system_check()
    return JSONResponse(
        found, status_code=200 if healthy else 503, headers={} if healthy else {"Retry-After": "5"}
    )


handler = Mangum(web.create_app("Health", router), lifespan="off")
