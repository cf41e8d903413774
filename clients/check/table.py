"""The results of all clients as a table, on the console and in the page of the documentation."""

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

KINDS = ("plain", "stream", "tools", "required", "structured", "loop")
ROUTES = {"chat": "chats", "responses": "Responses", "messages": "Messages"}
MAX_REASON = 240
"""Characters of a reason in the page."""


@dataclass(frozen=True)
class Result:
    """Of a case. engine: `-`, and route too, if the client did not run. error: empty if it
    passed."""

    client: str
    versions: str
    engine: str
    route: str
    case: str
    error: str

    @property
    def line(self) -> str:
        name = f"{self.client} {self.engine} {self.route} {self.case}"
        return f"{name}: {'ok' if not self.error else ' '.join(self.error.split())[:400]}"


def as_text(results: Sequence[Result]) -> str:
    """A Markdown table with one row for each client and route, and the reasons of failures below.
    A cell is `ok` if the case passed with given texts, and empty if it did not run with them."""
    results = [one for one in results if one.engine != "model"]
    rows, reasons = [], dict[str, int]()
    for client, versions, route in dict.fromkeys((r.client, r.versions, r.route) for r in results):
        own = [one for one in results if (one.client, one.route) == (client, route)]
        cells = [_cell([one for one in own if one.case == case], reasons) for case in KINDS]
        rows.append((client, versions, ROUTES.get(route, route), *cells))
    head = ("client", "packages", "API", *KINDS)
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
    filled = partial(textwrap.fill, width=100, subsequent_indent="   ", break_long_words=False)
    notes = [filled(f"{number}. {reason}") for reason, number in reasons.items()]
    return "\n".join([*lines, "", *notes])


def _cell(results: Sequence[Result], reasons: dict[str, int]) -> str:
    failed = [_reason(one) for one in results if one.error]
    if not failed:
        return "ok" if results else ""
    return ", ".join(
        dict.fromkeys(f"no ({reasons.setdefault(r, len(reasons) + 1)})" for r in failed)
    )


def _reason(result: Result) -> str:
    text = " ".join(result.error.split()).replace("|", "\\|")
    return f"`{text[:MAX_REASON].replace('`', chr(39))}`"


def with_model(results: Sequence[Result]) -> str:
    """How many cases of each client passed with the model itself, and why others did not."""
    own = [one for one in results if one.engine == "model"]
    run = Counter(one.client for one in own)
    passed = Counter(one.client for one in own if not one.error)
    shown = ", ".join(f"{name} {passed[name]} of {run[name]}" for name in run)
    failed = "".join(f" {one.client} {one.case}: {_reason(one)}." for one in own if one.error)
    text = f"Cases that passed with the model itself: {shown or 'not run'}.{failed}"
    return textwrap.fill(text, width=100, break_long_words=False, break_on_hyphens=False)


def page_with(page: str, results: Sequence[Result], model: str) -> str:
    """The page with this table. model: whose tokenizer and chat template were served."""
    about = f"Tokenizer and chat template: {model}."
    made = f"{about}\n\n{as_text(results)}\n{with_model(results)}\n"
    begin, end = "<!-- generated: clients -->", "<!-- end -->"
    return re.sub(f"(?s){begin}.*?{end}", lambda _: f"{begin}\n{made}\n{end}", page)
