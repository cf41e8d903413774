"""The exception of all checks of the front."""

from __future__ import annotations


class Refused(Exception):
    """The request is not forwarded; the client gets this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
