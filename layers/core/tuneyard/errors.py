"""Everything that can go wrong in a way a client should hear about.

ApiError
├── BadRequest         400  the request could not be read
├── Unauthorized       401  no key, or one we do not know
├── BudgetSpent        402
├── Forbidden          403  we know the key; it may not do this
├── NotFound           404  also for what belongs to another team
├── Conflict           409  the thing is not in the state the request needs
├── TooLarge           413
├── Invalid            422  readable, but a value cannot be accepted
├── TooManyRequests    429  with Retry-After
└── Unavailable        503  with Retry-After
TrainingError               the work itself failed: ends a job as `failed` with this sentence
"""

from __future__ import annotations


class ApiError(Exception):
    """An error with the status and code that a client sees; its text is a sentence that says what to do."""

    status = 500
    code = "internal_error"
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after = retry_after


class BadRequest(ApiError):
    """The request could not be read."""

    status, code, type = 400, "bad_request", "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """The prompt, or prompt and answer together, do not fit the model's context."""

    code = "context_length_exceeded"


class Unauthorized(ApiError):
    """No key, or one we do not know."""

    status, code, type = 401, "invalid_api_key", "authentication_error"


class BudgetSpent(ApiError):
    """The team has no budget left."""

    status, code, type = 402, "budget_spent", "billing_error"


class Forbidden(ApiError):
    """The key is known, and may not do this."""

    status, code, type = 403, "permission_denied", "permission_error"


class NotFound(ApiError):
    """No such thing, or it belongs to a team that is not the caller's."""

    status, code, type = 404, "not_found", "invalid_request_error"


class ModelNotFound(NotFound):
    """A chat names a model, checkpoint or alias that is not there."""

    code = "model_not_found"


class Conflict(ApiError):
    """The thing is not in the state that the request needs."""

    status, code, type = 409, "conflict", "invalid_request_error"


class TooLarge(ApiError):
    """The body is over the size limit."""

    status, code, type = 413, "request_too_large", "invalid_request_error"


class Invalid(ApiError):
    """The request is readable, but one of its values cannot be accepted."""

    status, code, type = 422, "invalid_value", "invalid_request_error"


class TooManyRequests(ApiError):
    """Over a concurrency limit; try again after ``retry_after`` seconds."""

    status, code, type = 429, "rate_limit_exceeded", "rate_limit_error"


class Unavailable(ApiError):
    """A part that the request needs is not there now; try again after ``retry_after`` seconds."""

    status, code, type = 503, "unavailable", "server_error"


class TrainingError(Exception):
    """The work of a job failed, not the machine: its text becomes the job's ``error_message``."""
