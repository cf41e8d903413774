"""How the inputs of a pass are cut: into passes, and into sequences for the attention."""

from __future__ import annotations

from dataclasses import replace

from smartspec_py.engines.checkpoints.recurrent import TILE
from smartspec_py.engines.runtimes.runner import Parts, RowInput

MOST_EMPTY = 8
"""Empty tiles in a pass. One takes an eighth of a pass of one token (0.65 B, AMD EPYC Zen 3)."""


def cut(row: RowInput, num: int) -> tuple[RowInput, RowInput]:
    """The first num tokens of an input, and the others."""
    num_rest = len(row.tokens) - num
    num_logits = max(0, row.num_logits - num_rest)
    num_prompt = min(num, row.num_prompt)
    kept = row.kept_state
    is_first = kept is not None and kept[0] <= row.position + num
    head = replace(
        row,
        tokens=row.tokens[:num],
        num_logits=num_logits,
        num_prompt=num_prompt,
        kept_state=kept if is_first else None,
    )
    rest = replace(
        row,
        position=row.position + num,
        tokens=row.tokens[num:],
        num_logits=row.num_logits - num_logits,
        num_prompt=row.num_prompt - num_prompt,
        kept_state=None if is_first else kept,
    )
    return head, rest


def bounded(parts: Parts, most: int) -> list[Parts]:
    """The parts in passes of at most so many tokens, see `with_copy`."""
    passes: list[Parts] = []
    room = 0
    for index, part in parts:
        while _size(part) > room:
            if room > (part.num_prompt > 0):
                head, part = cut(part, room)
                passes[-1].append((index, head))
            passes.append([])
            room = most
        passes[-1].append((index, part))
        room -= _size(part)
    return passes


def of_like_lengths(parts: Parts) -> list[Parts]:
    """The parts in passes of rows with similar numbers of tiles: a pass loops over as many tiles of
    each row that changes its state as of the longest, see `recurrent`."""
    passes: list[Parts] = []
    most = num_empty = 0
    for index, part in sorted(parts, key=lambda one: -_num_looped(one[1])):
        num = _num_looped(part)
        num_empty += most - num if num else 0
        if not passes or num_empty > MOST_EMPTY:
            passes.append([])
            most, num_empty = num, 0
        passes[-1].append((index, part))
    return passes


def _num_looped(part: RowInput) -> int:
    """Tiles, or 0 if none gets whole, so that the state is not changed."""
    first, end = part.position // TILE, part.position + len(part.tokens)
    return -(-end // TILE) - first if end // TILE > first else 0


def with_copy(row: RowInput) -> RowInput:
    """A single token of a prompt with a copy behind it, whose key the next pass overwrites."""
    return replace(row, tokens=[*row.tokens] * 2, num_prompt=2) if row.num_prompt == 1 else row


def _size(row: RowInput) -> int:
    return 2 if row.num_prompt == 1 else len(row.tokens)


def attended_parts(row: RowInput) -> list[RowInput]:
    """The tokens of an input by attention: those of a prompt together, others one by one."""
    first, own = row.num_prompt, row.adapter
    bounds = ([(0, first)] if first else []) + [(i, i + 1) for i in range(first, len(row.tokens))]
    return [
        RowInput(
            row.row,
            row.position + i,
            row.tokens[i:end],
            num_logits=0,
            num_prompt=max(0, min(end, first) - i),
            adapter=own,
            blocks=row.blocks,
        )
        for i, end in bounds
    ]
