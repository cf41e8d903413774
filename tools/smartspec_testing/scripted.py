"""An engine that writes given texts: for tests of what reads them. No model, no weights.

A script is a list of rules. The rule whose `when` stands last in the prompt applies, and its
`write` has the texts to write, the preferred one first. The logits of the next token of the first
text are highest, those of the second less high, and so on. So the real target samples, verifies
drafts and applies grammars, and a grammar that forbids the first text chooses another one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from smartspec_py.config import LimitsConfig
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.model_files import (
    end_tokens,
    load_tokenizer,
    stepwise_capabilities,
)
from smartspec_py.engines.runtimes.runner import (
    PYTORCH,
    PassOutput,
    RowInput,
    Runner,
    RunnerConfig,
)
from smartspec_py.engines.tokenizer_file import num_token_ids

NO_RULE = "No rule of the script applies."
FIRST_LOGIT, LOGIT_STEP, END_LOGIT = 200.0, 10.0, 50.0
"""Of the next token of the first text; how much lower those of the next texts are; and of the end
where no text applies. All other tokens have 0, so sampling draws the highest almost surely."""


class Script:
    """The rules: pairs of a text of the prompt, and the texts to write."""

    def __init__(self, rules: Sequence[tuple[str, Sequence[str]]]) -> None:
        self._rules = rules

    def answers(self, prompt: str) -> Sequence[str]:
        found = [(prompt.rfind(when), write) for when, write in self._rules]
        place, write = max(found, key=lambda pair: pair[0], default=(-1, ()))
        return write if place >= 0 else (NO_RULE,)


def read_script(path: Path) -> Script:
    """A JSON list of objects with `when` (a text) and `write` (a list of texts)."""
    rules = json.loads(path.read_text(encoding="utf-8"))
    return Script([(rule["when"], tuple(rule["write"])) for rule in rules])


class _Rows:
    """The tokens of each row. starts: where the generated text begins. answers: what to write."""

    spreads_nan = False

    def __init__(self, num_rows: int, max_len: int) -> None:
        self.num_blocks, self.block_len = num_rows, max_len
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.starts = [0] * num_rows
        self.answers: list[Sequence[str]] = [()] * num_rows

    def copy_block(self, source: int, destination: int, num_tokens: int) -> None:
        self.tokens[destination] = self.tokens[source][:num_tokens]
        self.starts[destination] = self.starts[source]
        self.answers[destination] = self.answers[source]

    def clear(self, blocks: Sequence[int], first: int = 0) -> None:
        for row in blocks:
            del self.tokens[row][first:]

    def drop(self, blocks: Sequence[int]) -> None:
        self.clear(blocks)


class ScriptedRunner(Runner):
    """Computes logits from a script. `end_token` follows a text."""

    runtime = PYTORCH
    about = "a script"
    bytes_per_token = 1

    def __init__(
        self, config: RunnerConfig, script: Script, tokenizer: Tokenizer, end_token: int
    ) -> None:
        super().__init__(config)
        self.rows = _Rows(config.num_rows, config.max_len)
        self.cache = self.rows
        self._script, self._tokenizer, self._end_token = script, tokenizer, end_token

    def forward(
        self, inputs: Sequence[RowInput], token_ids: torch.Tensor | None = None
    ) -> PassOutput:
        num_rows = sum(one.num_logits for one in inputs)
        logits = torch.zeros(num_rows, self.config.vocab_size)
        rows = iter(logits)
        for one in inputs:
            self._read(one)
            end = one.position + len(one.tokens)
            for known in range(end - one.num_logits + 1, end + 1):
                self._favour(next(rows), one.row, known)
        return PassOutput(logits)

    def _read(self, one: RowInput) -> None:
        tokens = self.rows.tokens[one.row]
        tokens[one.position :] = one.tokens
        if one.num_prompt and one.num_logits:
            start = one.position + one.num_prompt
            self.rows.starts[one.row] = start
            self.rows.answers[one.row] = self._script.answers(self._text(tokens[:start]))

    def _favour(self, logits: torch.Tensor, row: int, known: int) -> None:
        """known: the tokens of the row that the next one follows."""
        logits[self._end_token] = END_LOGIT
        written = self.rows.tokens[row][self.rows.starts[row] : known]
        for index, answer in enumerate(self.rows.answers[row]):
            token = self._next(answer, written)
            value = FIRST_LOGIT - LOGIT_STEP * index
            if token is not None:
                logits[token] = max(float(logits[token]), value)

    def _next(self, answer: str, written: Sequence[int]) -> int | None:
        """The token of this answer after those that are written; None if they differ from it."""
        tokens = [*self._ids(answer), self._end_token]
        if tokens[: len(written)] == list(written) and len(written) < len(tokens):
            return tokens[len(written)]
        # Forced tokens may divide the same text otherwise.
        text = self._text(written)
        if not answer.startswith(text):
            return None
        return next(iter(self._ids(answer[len(text) :])), self._end_token)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def build_scripted(tokenizer_dir: Path, script: Path, limits: LimitsConfig) -> Engine:
    """The engine. Its passes cost the same whatever they read, so drafts are always worth it."""
    tokenizer = load_tokenizer("engine.tokenizer", tokenizer_dir)
    vocab_size = num_token_ids(tokenizer)
    config = RunnerConfig(
        path=tokenizer_dir,
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_rows=limits.max_sequences,
        max_len=limits.context_len,
        vocab_size=vocab_size,
    )
    ends = end_tokens(tokenizer_dir, vocab_size, tokenizer)
    runner = ScriptedRunner(config, read_script(script), tokenizer, ends[0])
    return Engine(
        tokenizer=tokenizer,
        end_tokens=ends,
        target=LocalTarget(runner, stepwise_capabilities(limits, vocab_size)),
        proposers={},
        cost=CostModel(PassTable((1,), (1,), ((0.001,),))),
    )
