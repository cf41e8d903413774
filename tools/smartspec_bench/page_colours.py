"""What a policy looks like, the same in every picture and table, on light and on dark paper.

The adaptive policy is orange and thick, no speculation grey and dashed, fixed draft lengths a
family of blues from short to long. Markers differ too, so that no line is told by colour alone.
Pictures are drawn in the light colours; on a page these become CSS variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ADAPTIVE = "goodput"
FIXED = "fixed:"


@dataclass(frozen=True)
class Colour:
    """Two hexadecimal RGB values: on white, and on near black. Each at least 3:1 against it."""

    light: str
    dark: str


@dataclass(frozen=True)
class Look:
    """A policy's line. dash: matplotlib's line style. variable: the colour's CSS variable."""

    colour: Colour
    marker: str
    dash: str | tuple[int, tuple[int, ...]]
    width: float
    variable: str


INK = Colour("#1b1f24", "#e8ebef")
MUTED = Colour("#59626d", "#a7b0bb")
RULE = Colour("#d9dee4", "#373d46")
PAPER = Colour("#ffffff", "#15181d")
SHARES: Mapping[str, Colour] = {
    "draft": Colour("#f3c677", "#8a5c12"),
    "target": Colour("#b7cfe6", "#2d5680"),
    "host": Colour("#dadcdf", "#4b5159"),
}
"""Parts of a step; pale enough for ink on them."""

_KNOWN: Mapping[str, tuple[Colour, str, str | tuple[int, tuple[int, ...]], float]] = {
    ADAPTIVE: (Colour("#c94a00", "#ff9040"), "o", "-", 2.6),
    "goodput_global": (Colour("#7b3294", "#d9a6e8"), "P", (0, (1, 1)), 1.8),
    "none": (Colour("#5e6873", "#aab4bf"), "X", (0, (4, 2)), 1.6),
    "batch_table": (Colour("#00795a", "#3cc9a0"), "*", (0, (6, 1, 1, 1)), 1.6),
}
_SHORTEST = Colour("#4292c6", "#3d86c6")
_LONGEST = Colour("#08306b", "#dcebf7")
_FIXED_MARKERS = "s^Dvph<>"
_OTHERS = (Colour("#806600", "#e0c050"), Colour("#a3316b", "#f0a0c0"), Colour("#8a4b2a", "#d9a282"))


def ordered(policies: Iterable[str]) -> list[str]:
    """Each once: the adaptive ones, none, the fixed by length, then the rest by name."""
    first = [ADAPTIVE, "goodput_global", "none"]

    def key(policy: str) -> tuple[int, int, str]:
        if policy in first:
            return first.index(policy), 0, policy
        length = _length(policy)
        return (len(first), length, policy) if length is not None else (len(first) + 1, 0, policy)

    return sorted(set(policies), key=key)


def looks(policies: Iterable[str]) -> dict[str, Look]:
    """By policy, in the order of `ordered`."""
    names = ordered(policies)
    fixed = [name for name in names if _length(name) is not None]
    others = [name for name in names if name not in _KNOWN and name not in fixed]
    found = {}
    for index, name in enumerate(names):
        variable = f"--policy-{index}"
        if name in _KNOWN:
            found[name] = Look(*_KNOWN[name], variable)
        elif name in fixed:
            found[name] = _fixed_look(fixed.index(name), len(fixed), variable)
        else:
            colour = _OTHERS[others.index(name) % len(_OTHERS)]
            found[name] = Look(colour, "d", (0, (2, 1)), 1.4, variable)
    return found


def variables(policies: Mapping[str, Look]) -> list[tuple[str, Colour]]:
    """Name and colour of every CSS variable of a page."""
    base = [("--ink", INK), ("--muted", MUTED), ("--rule", RULE), ("--paper", PAPER)]
    shares = [(f"--share-{name}", colour) for name, colour in SHARES.items()]
    return [*base, *shares, *((look.variable, look.colour) for look in policies.values())]


def _length(policy: str) -> int | None:
    number = policy.removeprefix(FIXED)
    return int(number) if policy.startswith(FIXED) and number.isdigit() else None


def _fixed_look(index: int, num_fixed: int, variable: str) -> Look:
    share = index / (num_fixed - 1) if num_fixed > 1 else 0.5
    colour = Colour(
        _between(_SHORTEST.light, _LONGEST.light, share),
        _between(_SHORTEST.dark, _LONGEST.dark, share),
    )
    return Look(colour, _FIXED_MARKERS[index % len(_FIXED_MARKERS)], "-", 1.4, variable)


def _between(start: str, end: str, share: float) -> str:
    parts = zip(_channels(start), _channels(end), strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in parts)


def _channels(colour: str) -> Sequence[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
