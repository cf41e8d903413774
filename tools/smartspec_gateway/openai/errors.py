"""Errors in OpenAI's format."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of all answers but 200."""

    error: ErrorFields


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong: `param` names the field."},
    "5XX": {"model": ErrorBody, "description": "The model or the endpoint is not available."},
}


class ApiError(Exception):
    """An answer with this status. param: the field that is wrong, if any. code: OpenAI's word."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.retry_after_s, self.code = retry_after_s, code

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else KINDS[400])
        names = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": names}
