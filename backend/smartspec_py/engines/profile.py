"""Measures how long an engine's passes take before it serves, and stores the result on disk.

A profile is valid for a pair of models, a machine, settings, library versions and a driver. If any
of them changes, the server measures again. This takes a few seconds, or longer if passes are long.
After `limits.profile_s`, no new rounds start. The file of a profile also stores what a server has
learned (`serving.learned`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smartspec_py.core.cost import CostModel, PassTable, cost_from_json, interpolate
from smartspec_py.defaults import LEAST_CHUNK
from smartspec_py.engines.base import Profilable

logger = logging.getLogger(__name__)

PROFILE_VERSION = 11
"""Raise it when the meaning of a stored number changes, or the engine becomes faster."""

NUM_ROUNDS = 5
ENOUGH_S = 0.1
"""A pass that was timed for so many seconds, and twice, is not timed again: chance matters less."""

LONG_S = 0.2
"""If a pass takes longer, passes over more tokens of as many rows are not timed. The table goes on
with the last slope: such passes are limited by arithmetic, so each token costs the same."""

ROW_GRID = (1, 2, 4, 8, 16, 32, 64, 128)
TOKEN_GRID = (1, 2, 3, 4, 6, 8, 12, 16)
PROMPT_GRID = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WORTH_DOUBLING = 0.9
"""Starting at LEAST_CHUNK, the prompt chunk is doubled while the time per token falls to this
factor or less. Then one larger pass delays the other requests less than two smaller passes. Result
on two cores of an Intel Xeon with AMX: 256 tokens in bfloat16 and 128 in float32."""

CATCH_UP_TOKENS = (16, 80)
"""Tokens of two passes of the draft model. Their difference gives the cost of one token."""

OTHER_SIZES, LEAST_CHANGE = (4, 5, 6, 7), 0.02
"""Tokens of passes that are run to find out what another number costs: more than an engine keeps
ready. If that is a smaller share of a pass, it is taken as 0."""

DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))
"""Linux files with the version of NVIDIA's driver. A container may show only one of them."""


@dataclass(frozen=True)
class ProfileShape:
    """The range of passes that a server can run.

    context_len: tokens of context to measure at.
    prefill_chunk: prompt tokens in a pass. None: the profile chooses it, see WORTH_DOUBLING.
    max_prompt: most prompt tokens that one request can have.
    """

    max_sequences: int
    max_draft_len: int
    context_len: int
    prefill_chunk: int | None
    max_prompt: int


class _Pass(NamedTuple):
    """See `Profilable`."""

    batch_size: int
    tokens_per_row: int
    context_len: int
    num_logits: int | None = None


def read_profile(path: Path) -> dict[str, Any]:
    """The document of a profile; empty if there is none. A damaged one is logged, not raised."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return {}
    return document


def _refuse(constant: str) -> None:
    """Reject NaN and infinities, which Python's JSON parser accepts. They would spread to all
    estimates."""
    raise ValueError(f"{constant} is not a finite number")


def write_json(path: Path, document: Any) -> None:
    """Write the document to a temporary file and rename it, so readers never see half a file.

    Raises OSError. In that case no file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
        partial.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def profile(
    target: Profilable,
    draft: Profilable | None,
    shape: ProfileShape,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> CostModel:
    """Measure a cost model.

    Target passes are measured over rows x tokens and over prompt tokens, draft passes over rows.
    budget_s: after this many seconds, each pass is measured only once. clock: seconds, any origin.
    """
    until_s = clock() + budget_s

    def is_over() -> bool:
        return clock() >= until_s

    rows = _grid(ROW_GRID, shape.max_sequences)
    tokens = _grid(TOKEN_GRID, shape.max_draft_len + 1)
    change_s = _change_s(target, is_over)
    timer = _Timer(is_over, "target", target, is_ready=change_s > 0.0)
    table = timer.table(rows, tokens, shape.context_len)
    prompt = _prompt_table(_Timer(is_over, "prompt", target), shape)
    if draft is None:
        return CostModel(target=table, prompt=prompt, change_s=change_s)
    # The cost of one token in a pass that reads the tokens missing from the draft cache.
    few, many = CATCH_UP_TOKENS
    few_s, many_s = _Timer(is_over, "catch-up", draft).prompt_s(CATCH_UP_TOKENS)
    catch_up_s = max(0.0, many_s - few_s) / (many - few)
    draft_table = _Timer(is_over, "draft", draft, target).table(rows, (1,), shape.context_len)
    return CostModel(table, draft_table, change_s=change_s, catch_up_s=catch_up_s, prompt=prompt)


def _change_s(engine: Profilable, is_over: Callable[[], bool]) -> float:
    """`CostModel.change_s`: a pass behind several of other sizes, and behind one of its own."""
    behind_others, again = [], []
    for number in range(NUM_ROUNDS):
        if number and is_over():
            break
        for num_tokens in OTHER_SIZES:
            engine.time_pass(1, num_tokens, 0, 1)
        behind_others.append(engine.time_pass(1, OTHER_SIZES[0] - 1, 0, 1))
        again.append(engine.time_pass(1, OTHER_SIZES[0] - 1, 0, 1))
    change_s = min(behind_others) - min(again)
    return change_s if change_s > LEAST_CHANGE * min(again) else 0.0


def _grid(grid: Sequence[int], largest: int) -> tuple[int, ...]:
    return (*(value for value in grid if value < largest), largest)


def _prompt_table(timer: _Timer, shape: ProfileShape) -> PassTable:
    """Pass times for reading prompts: one row, logits for the last position only.

    The last number of tokens in the table is the prompt chunk.
    """
    chunk = min(shape.prefill_chunk or LEAST_CHUNK, shape.max_prompt)
    tokens = _grid(PROMPT_GRID, chunk)
    seconds = timer.prompt_s(tokens)
    while shape.prefill_chunk is None and 2 * chunk <= min(shape.max_prompt, PROMPT_GRID[-1]):
        [twice_s] = timer.prompt_s((2 * chunk,))
        if twice_s > WORTH_DOUBLING * 2 * seconds[-1]:
            break
        chunk *= 2
        tokens, seconds = (*tokens, chunk), [*seconds, twice_s]
    return PassTable((1,), tokens, (tuple(seconds),))


class _Timer:
    """Measures an engine's passes. is_over: whether the budget is spent. name: for the log.
    is_ready: whether each pass is timed behind one of the same size.

    behind: an engine whose passes run between the passes of this one. Its weights replace those of
    this engine in the CPU's caches. Therefore each measurement runs `behind` once and then averages
    two passes of this engine, and only the first of them finds the caches in this state.
    """

    def __init__(
        self,
        is_over: Callable[[], bool],
        name: str,
        engine: Profilable,
        behind: Profilable | None = None,
        is_ready: bool = False,
    ) -> None:
        self._is_over, self._name, self._engine, self._behind = is_over, name, engine, behind
        self._is_ready = is_ready

    def table(
        self,
        rows: tuple[int, ...],
        tokens: tuple[int, ...],
        context_len: int,
    ) -> PassTable:
        # The largest batch shows the effect of context best: it reads the most keys and values.
        shorter = context_len // 4
        lines = {r: self._line(r, tokens, context_len) for r in rows}
        points = [point for line in lines.values() for point in line]
        at_shorter = _Pass(rows[-1], tokens[0], shorter)
        # The pass with the most tokens after the first of their rows.
        longest = max(points, key=lambda one: one.batch_size * (one.tokens_per_row - 1))
        longest_at_shorter = longest._replace(context_len=shorter)
        timed = [*points, longest_at_shorter, at_shorter]
        best = dict(zip(timed, self._best_s(timed), strict=True))
        saved_s = max(0.0, best[lines[rows[-1]][0]] - best[at_shorter])
        num_less = max(1, context_len - shorter)
        context_s = saved_s / (rows[-1] * num_less)
        saved_s = (
            best[longest] - best[longest_at_shorter] - context_s * longest.batch_size * num_less
        )
        num_more = longest.batch_size * (longest.tokens_per_row - 1)
        context_token_s = max(0.0, saved_s) / (num_less * max(1, num_more))
        seconds = []
        for line in lines.values():
            known = [best[point] for point in line]
            counts = tokens[: len(known)]
            seconds.append(tuple(interpolate(num, counts, known) for num in tokens))
        return PassTable(rows, tokens, tuple(seconds), context_len, context_s, context_token_s)

    def _line(self, rows: int, tokens: tuple[int, ...], context_len: int) -> list[_Pass]:
        """The passes of so many rows that are worth timing, see LONG_S; at least two.

        Runs each of them once, because the first pass of a size is slower."""
        line: list[_Pass] = []
        seconds = 0.0
        for num in tokens:
            if len(line) > 1 and seconds > LONG_S:
                break
            line.append(_Pass(rows, num, context_len))
            seconds = self._engine.time_pass(*line[-1])
        return line

    def prompt_s(self, tokens: Sequence[int]) -> list[float]:
        """Seconds of a pass with one row, for each number of tokens."""
        return self._best_s([_Pass(1, num, 0, num_logits=1) for num in tokens])

    def _best_s(self, points: Sequence[_Pass]) -> list[float]:
        """Seconds of each pass: the best of several rounds, see ENOUGH_S.

        Disturbances only make a pass longer, so the best time is the time of the pass itself. Each
        round covers all points, so that a disturbance does not affect a single point only.
        """
        self._engine.time_pass(*points[-1])  # the first pass pays for allocations
        best_s, total_s = [math.inf] * len(points), [0.0] * len(points)
        for number in range(NUM_ROUNDS):
            logger.info("timing %s passes: round %d of %d", self._name, number + 1, NUM_ROUNDS)
            for index, point in enumerate(points):
                if number and self._is_over():
                    logger.warning("limits.profile_s has passed: costs are from fewer rounds")
                    return best_s
                if number > 1 and total_s[index] > ENOUGH_S:
                    continue
                seconds = self._pass_s(point)
                best_s[index] = min(best_s[index], seconds)
                total_s[index] += seconds
        return best_s

    def _pass_s(self, point: _Pass) -> float:
        if self._is_ready:
            self._engine.time_pass(*point)
        if self._behind is None:
            return self._engine.time_pass(*point)
        self._behind.time_pass(1, 1, 0)
        return (self._engine.time_pass(*point) + self._engine.time_pass(*point)) / 2


def cached_profile(
    target: Profilable,
    draft: Profilable | None,
    shape: ProfileShape,
    folder: Path | None,
    identity: Sequence[str],
    budget_s: float = math.inf,
) -> CostModel:
    """Return the stored profile of this identity, or measure and store a new one.

    identity: everything else that the cost depends on: models, device, settings, library versions.
    The machine and its driver are added here.
    folder: None stores nothing. If it cannot be read or written, this is logged and not raised.
    budget_s: see `profile`.
    """
    path = profile_path(shape, folder, identity)
    if path is None:
        return profile(target, draft, shape, budget_s)
    if "cost" in (document := read_profile(path)):
        try:
            cost = cost_from_json(document["cost"])
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be used (%s): measuring again", path, error)
        else:
            logger.info("profile read from %s", path)
            return cost
    start = time.perf_counter()
    cost = profile(target, draft, shape, budget_s)
    seconds = time.perf_counter() - start
    try:
        store_cost(cost, path, _whole_identity(shape, identity))
    except OSError as error:
        logger.warning(
            "engine.profile_cache: the profile, measured in %.1f s, cannot be stored (%s). The "
            "next start measures again: set a folder that can be written",
            seconds,
            error,
        )
    else:
        logger.info("profiled in %.1f s, stored in %s", seconds, path)
    return cost


def profile_path(shape: ProfileShape, folder: Path | None, identity: Sequence[str]) -> Path | None:
    """The file that `cached_profile` uses for the same arguments; None without a folder."""
    if folder is None:
        return None
    text = "\n".join(_whole_identity(shape, identity))
    return folder / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _whole_identity(shape: ProfileShape, identity: Sequence[str]) -> list[str]:
    return [f"v{PROFILE_VERSION}", repr(shape), machine_name(), driver_name(), *identity]


def store_cost(cost: CostModel, path: Path, identity: Sequence[str] = ()) -> None:
    write_json(path, {"identity": list(identity), "cost": asdict(cost)})


def load_cost(path: Path) -> CostModel:
    """Raises OSError, KeyError, TypeError or ValueError if the file is not a stored profile."""
    return cost_from_json(json.loads(path.read_text(encoding="utf-8"))["cost"])


def machine_name() -> str:
    """Number of cores, the processor's model (Linux only), and the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor()
    return f"{os.cpu_count()} x {name}, {platform.machine()}"


def driver_name(files: Sequence[Path] = DRIVER_FILES) -> str:
    """The version of NVIDIA's driver, read from the first of the files that exists."""
    found = next((path for path in files if path.is_file()), None)
    if found is None:
        return "no NVIDIA driver"
    return f"NVIDIA driver {found.read_text().partition(chr(10))[0].strip()}"


def fingerprint(folder: Path) -> str:
    """A hash of a model directory: its config, and the names and sizes of its weight files, or
    where the weights are in a GGUF file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in folder.glob("gguf.json"):
        digest.update(path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
    return digest.hexdigest()
