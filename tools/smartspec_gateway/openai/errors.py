"""Errors, and their format in OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smartspec_gateway.openai.surrogates import without_surrogates

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
TOO_LONG = "context_length_exceeded"
"""OpenAI's word for what does not fit the context."""


class ApiError(Exception):
    """An answer with this status. param: the field that is wrong, if any; the message begins with
    it. code: OpenAI's word."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        code: str | None = None,
    ) -> None:
        message = without_surrogates(message)  # it can quote any text
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.retry_after_s, self.code = retry_after_s, code

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.status, self.message, self.param, self.retry_after_s, self.code)
        return type(self), fields

    def about(self, param: str) -> ApiError:
        """The same error of a field with another name."""
        message = param + self.message.removeprefix(self.param or "")
        return ApiError(self.status, message, param, self.retry_after_s, self.code)

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error with the name that an API has for the field. The longest prefix of the
        field that is a key is replaced by its value."""
        param = self.param or ""
        for name in sorted(names, key=len, reverse=True):
            if f"{param}.".startswith(f"{name}."):
                return self.about(names[name] + param[len(name) :])
        return self

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's format."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else KINDS[400])
        names = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": names}


class PromptTooLong(ApiError):
    """num_tokens: of the prompt, more than most. got, allowed: the same in words."""

    def __init__(self, param: str, got: str, allowed: str, num_tokens: int, most: int) -> None:
        message = f"{param}: got {got}, must be at most {allowed}"
        super().__init__(400, message, param, code=TOO_LONG)
        self._given = param, got, allowed, num_tokens, most
        self.num_tokens, self.most = num_tokens, most

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given
