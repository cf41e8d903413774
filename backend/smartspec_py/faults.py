"""The error of the configuration, and what code catches that keeps a fault to what it concerns: one
request, or one proposer.

A panic of a library in Rust, such as tokenizers or llguidance, is a `BaseException` and no
`Exception`. So such code has two clauses:

    except ENDS:
        raise
    except BaseException as error:
        ...
"""

from __future__ import annotations

ENDS = KeyboardInterrupt, SystemExit, GeneratorExit
"""Exceptions that end the program or a generator, and are no faults."""


class ConfigError(ValueError):
    """engine.json cannot be used; the message names the file, the key and the reason."""


def cut(text: object, most: int = 80) -> str:
    """A text for a message, with `..` where it is cut."""
    text = str(text)
    return text if len(text) <= most else f"{text[:most]}.."


def shown(value: object) -> str:
    """A value for a message, as Python writes it."""
    return cut(repr(value))


def sentence(error: BaseException) -> str:
    """The kind and the text of an exception, for the client."""
    return f"{type(error).__name__}: {error}"
