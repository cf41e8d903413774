"""Streams prompts with and without speculation in turns, and compares the two."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from smartspec_bench.progress import Progress
from smartspec_bench.streams import COUNTS, Exchange, GrpcStreams, HttpStreams, ask
from smartspec_cli.commands import table
from smartspec_launch.address import Address

NO_SPECULATION = "none"
NUM_RUNS = 3
MAX_TOKENS = 128
SEED = 2024


@dataclass(frozen=True)
class Sent:
    """A prompt. name: of its row. text: what the model reads, with its chat template. shown: what a
    person sees before the answer."""

    name: str
    text: str
    shown: str


@dataclass(frozen=True)
class Row:
    """A prompt's line in the table. Lengths are per decoding step with speculation: drafted
    tokens, and gained tokens (accepted drafts plus one). The step of the prompt, which generates
    the first token, is not counted."""

    prompt: str
    transport: str
    num_tokens: int
    tokens_per_s_without: float
    tokens_per_s_with: float
    speed_up: float
    mean_draft_len: float
    mean_acceptance_len: float
    is_same_text: bool


COLUMNS = {
    "prompt": "{0.prompt}",
    "transport": "{0.transport}",
    "tokens": "{0.num_tokens}",
    "tokens/s\nwithout": "{0.tokens_per_s_without:.1f}",
    "tokens/s\nwith": "{0.tokens_per_s_with:.1f}",
    "speed-up": "{0.speed_up:.2f}",
    "drafted\nper\nstep": "{0.mean_draft_len:.2f}",
    "tokens\nper\nstep": "{0.mean_acceptance_len:.2f}",
}
"""Of the table: headings, and formats of a `Row`."""


def summarise(
    prompt: str, transport: str, speculated: Sequence[Exchange], plain: Sequence[Exchange]
) -> Row:
    """Medians over the runs; lengths are over all of their steps."""
    without, with_it = (
        statistics.median(one.num_tokens / one.timing.e2e_s for one in answers)
        for answers in (plain, speculated)
    )
    num_steps, num_drafted, num_accepted = (
        sum(answer.last[name] for answer in speculated) for name in COUNTS
    )
    return Row(
        prompt,
        transport,
        num_tokens=speculated[0].num_tokens,
        tokens_per_s_without=without,
        tokens_per_s_with=with_it,
        speed_up=with_it / without,
        mean_draft_len=num_drafted / max(1, num_steps),
        mean_acceptance_len=1.0 + num_accepted / max(1, num_steps),
        is_same_text=len({answer.text for answer in (*speculated, *plain)}) == 1,
    )


class Comparison:
    """policy: compared with no speculation. console: shows prompts and answers."""

    def __init__(self, policy: str, temperature: float, console: Console) -> None:
        fields = {
            "max_tokens": MAX_TOKENS,
            "min_tokens": 1,  # an empty text has no speed
            "stream": True,
            "temperature": temperature,
            "seed": SEED,
            "reuse_prefix": False,
        }
        self._policy, self._console = policy, console
        self._speculating = {**fields, "speculation_policy": policy}
        self._plain = {**fields, "speculation_policy": NO_SPECULATION}

    async def run(self, address: Address, prompts: Sequence[Sent]) -> list[Row]:
        """Stream each prompt, by turns over HTTP and gRPC."""
        async with HttpStreams(address.http_url) as http, GrpcStreams(address.grpc_url) as grpc:
            with Progress("warming up"):
                for each in (http, grpc):
                    for fields in (self._speculating, self._plain):
                        await ask(each, {**fields, "text_input": "Warm-up", "max_tokens": 8})
            rows = []
            for number, prompt in enumerate(prompts):
                rows.append(await self._row(prompt, grpc if number % 2 else http))
            return rows

    async def _row(self, prompt: Sent, transport: HttpStreams | GrpcStreams) -> Row:
        """Runs with and without speculation alternate. The first is printed as it streams."""
        text = {"text_input": prompt.text}
        self._console.rule(f"{prompt.name}, over {transport.name}", align="left")
        self._show(prompt.shown, "dim")
        with_it = [await ask(transport, self._speculating | text, self._show_answer)]
        without: list[Exchange] = []
        self._console.print()
        with Progress(f"measuring in {2 * NUM_RUNS - 1} more runs") as progress:
            for number in range(1, 2 * NUM_RUNS):
                progress.update(f"measuring in run {number + 1} of {2 * NUM_RUNS}")
                fields, done = ((self._speculating, with_it), (self._plain, without))[number % 2]
                done.append(await ask(transport, fields | text))
        row = summarise(prompt.name, transport.name, with_it, without)
        self._show(
            f"{row.num_tokens} tokens, {row.tokens_per_s_with:.1f} tokens/s: {row.speed_up:.2f} "
            "times the speed without speculation\n",
            "dim",
        )
        return row

    def _show(self, text: str, style: str) -> None:
        self._console.print(
            text, style=style, end="", markup=False, highlight=False, soft_wrap=True
        )

    def _show_answer(self, response: Mapping[str, Any]) -> None:
        self._show(response["text_output"], "bold")

    def table(self, rows: Sequence[Row]) -> Table:
        cells = ([value.format(row) for value in COLUMNS.values()] for row in rows)
        title = f"One request at a time, policy {self._policy} compared with none"
        caption = f"median of {NUM_RUNS} runs, prefill included"
        return table(title, list(COLUMNS), cells, caption, num_texts=2)
