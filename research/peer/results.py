"""The measurements, as peer.json stores them, and their ratios.

A block is everything that was measured with one start of a peer. A run replaces the blocks that it
measures, by `Block.key`, and keeps all others, such as those of other processors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from smartspec_bench.ratios import Ratio, interval
from smartspec_py.serving.profile import machine_name

NUM_TOKENS = 48
"""A request's, but where `Times.first_s` is measured."""

Dtype = Literal["float32", "bfloat16"]
Peer = Literal["vllm", "openvino"]

PEERS: tuple[Peer, ...] = ("vllm", "openvino")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")


class Times(NamedTuple):
    """Seconds of a job. first_s: with one token per request. whole_s: with NUM_TOKENS."""

    first_s: float
    whole_s: float

    @property
    def token_s(self) -> float:
        """Between a request's tokens, on average; without speculation a step."""
        return (self.whole_s - self.first_s) / (NUM_TOKENS - 1)


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measured(_Stored):
    """batch_size requests at once, by round. ours: by policy."""

    batch_size: int
    theirs: Sequence[Times]
    ours: Mapping[str, Sequence[Times]]

    def ratio(self, policy: str, figure: str = "token_s") -> Ratio | None:
        """Ours over the peer's, below 1 we are faster; without an interval for one round."""
        if policy not in self.ours:
            return None
        pairs = zip(self.ours[policy], self.theirs, strict=True)
        logs = [math.log(getattr(a, figure) / getattr(b, figure)) for a, b in pairs]
        if len(logs) == 1:
            return Ratio(math.exp(logs[0]), 0.0, math.inf, 1)
        return interval(logs)

    def with_round(self, theirs: Times, ours: Mapping[str, Times]) -> Measured:
        every = {name: [*self.ours.get(name, ()), times] for name, times in ours.items()}
        return Measured(batch_size=self.batch_size, theirs=[*self.theirs, theirs], ours=every)


class Block(_Stored):
    """k: the peer's draft length, 0 for none. same_texts: of how many. refused: its error."""

    processor: str
    dtype: Dtype
    peer: Peer
    k: int
    version: str
    date: str
    is_quick: bool = False
    same_texts: tuple[int, int] | None = None
    refused: str | None = None
    measured: Sequence[Measured] = ()

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.processor, self.dtype, self.peer, self.k


class ByHand(_Stored):
    """Ratios over vLLM without speculation that no run of this script wrote: value, low, high, or
    the value alone."""

    source: str
    processor: str
    dtype: Dtype
    batch_size: int
    none: tuple[float, ...]
    goodput: tuple[float, ...]


class Document(_Stored):
    format: Literal["smartspec-peer"] = "smartspec-peer"
    version: Literal[3] = 3
    num_tokens: int = NUM_TOKENS
    by_hand: Sequence[ByHand] = ()
    blocks: Sequence[Block] = ()

    def with_block(self, new: Block) -> Document:
        """A peer that refused does not replace what was measured before."""
        others = [block for block in self.blocks if block.key != new.key]
        is_worse = not new.measured and len(others) < len(self.blocks)
        return self if is_worse else self.model_copy(update={"blocks": [*others, new]})


class Compared(NamedTuple):
    ratio: Ratio
    peer: str
    k: int


def summary(blocks: Sequence[Block], batch_size: int) -> list[Compared | None]:
    """Of one processor and data type: none over vLLM's none and over the faster peer's, goodput
    over vLLM's none and over the best that a peer reaches with any k.

    The faster peer is the one with the higher ratio: that was measured in turns.
    """

    def highest(policy: str, peers: Sequence[str], ks: Container[int]) -> Compared | None:
        ratios = [
            Compared(ratio, block.peer, block.k)
            for block in blocks
            for one in block.measured
            if one.batch_size == batch_size and block.peer in peers and block.k in ks
            if (ratio := one.ratio(policy)) is not None
        ]
        return max(ratios, key=lambda compared: compared.ratio.value, default=None)

    return [
        highest("none", ["vllm"], [0]),
        highest("none", PEERS, [0]),
        highest("goodput", ["vllm"], [0]),
        highest("goodput", PEERS, range(100)),
    ]


def read(path: Path) -> Document:
    """Raises ValueError where the file is none of ours."""
    if not path.is_file():
        return Document()
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("version") == 2:
        return converted(document)
    return Document.model_validate(document)


def write(folder: Path, document: Document) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    between = folder / "peer.json.part"  # an interrupted run leaves a whole peer.json
    text = document.model_dump_json(indent=1, exclude_none=True)
    between.write_text(text + "\n", encoding="utf-8")
    between.replace(folder / "peer.json")


def converted(document: Mapping[str, Any]) -> Document:
    """From version 2: vLLM alone, in float32, of a processor of which only the name is known; a
    row has one of our policies, and the peer's times again in each."""
    blocks: dict[int, dict[int, Measured]] = {}
    for row in document["measured"]:
        ours, theirs = ([Times(**times) for times in row[side]] for side in ("ours", "theirs"))
        sizes = blocks.setdefault(row["k"], {})
        before = sizes.get(row["batch_size"])
        policies = {**(before.ours if before else {}), row["name"]: ours}
        sizes[row["batch_size"]] = Measured(
            batch_size=row["batch_size"], theirs=theirs, ours=policies
        )
    return Document(
        blocks=[
            Block(
                processor=document["machine"],
                dtype="float32",
                peer="vllm",
                k=k,
                version=document["peer"].split()[-1],
                date=document["measured"][0]["date"],
                measured=list(sizes.values()),
            )
            for k, sizes in blocks.items()
        ]
    )


class Processor(NamedTuple):
    name: str
    has_bfloat16: bool


def processor(cpuinfo: str | None = None) -> Processor:
    """This one. The name alone does not tell virtual ones apart, so that family, model and the
    instructions for bfloat16 are in it.

    cpuinfo: as Linux shows it in /proc/cpuinfo.
    """
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    of = {name.strip(): value.strip() for name, _, value in lines}
    flags = [flag for flag in BFLOAT16_FLAGS if flag in of.get("flags", "").split()]
    kind = f"family {of.get('cpu family', '?')} model {of.get('model', '?')}"
    support = f"with {' and '.join(flags)}" if flags else "without bfloat16"
    return Processor(
        f"{machine_name()}, {kind}, {support}",
        bool(flags),
    )
