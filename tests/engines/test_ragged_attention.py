"""The attention kernel of captured passes, in Triton's interpreter on a CPU or on a GPU.

The reference is computed in float64. A token's bits must not depend on the other inputs of the
pass, on how many programs compute a row, or on the size that the pass is padded to.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import ragged_reference
import torch

from smartspec_py.engines.draft import Tree
from smartspec_py.engines.runtimes.pytorch.layout import Line, Tiling, lay_out, size_of
from smartspec_py.engines.runtimes.pytorch.packed import PLAIN, Scores, write_plainly
from smartspec_py.engines.runtimes.runner import RowInput

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
pytest.importorskip("triton")
attention = importlib.import_module("smartspec_py.engines.runtimes.pytorch.attention")

on_gpu = pytest.mark.skipif(
    not HAS_GPU, reason="in the interpreter, NumPy's products depend on the place of a row"
)

NUM_ROWS, MAX_LEN = 5, 160


@dataclass(frozen=True)
class Case:
    """A cache with random keys. lengths: keys of each row, those of the pass included."""

    num_kv_heads: int = 2
    num_shared: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    max_len: int = MAX_LEN
    scores: Scores = PLAIN

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """keys, values of all slots, and a query for each slot."""
        torch.manual_seed(1)
        slots, heads = NUM_ROWS * self.max_len + 16, self.num_kv_heads * self.num_shared
        keys, values = torch.randn(2, slots, self.num_kv_heads, self.head_dim, device=DEVICE)
        queries = 2 * torch.randn(slots, heads, self.head_dim, device=DEVICE)
        return keys.to(self.dtype), values.to(self.dtype), queries.to(self.dtype)


def staged(
    case: Case, inputs: Sequence[RowInput], size: int | None = None
) -> tuple[torch.Tensor, Tiling]:
    tiling = Tiling.of(NUM_ROWS, case.num_shared)
    size = size or size_of(inputs)
    assert size is not None
    made, _ = lay_out(inputs, size, tiling, case.max_len, NUM_ROWS * case.max_len)
    return torch.from_numpy(made).to(DEVICE), tiling


def attended(
    case: Case,
    inputs: Sequence[RowInput],
    *,
    size: int | None = None,
    context_len: int | None = None,
) -> torch.Tensor:
    """The kernel's result for the tokens of the inputs. A token's query belongs to its slot."""
    lines, tiling = staged(case, inputs, size)
    keys, values, queries = case.tensors()
    given = queries[lines[Line.SLOT]], keys, values
    options = {"tiling": tiling, "max_len": case.max_len}
    context_len = context_len or case.max_len
    found = attention.attend(*given, lines, case.scores, context_len=context_len, **options)
    exact = (tensor.double() for tensor in given)
    expected = ragged_reference.attend(*exact, lines, case.scores, **options)
    num_tokens = sum(len(item.tokens) for item in inputs)
    tolerance = 5e-6 if case.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(
        found[:num_tokens].double(), expected[:num_tokens], rtol=tolerance, atol=tolerance
    )
    return found[:num_tokens]


def some(row: int, position: int, num_tokens: int, first: int = 0) -> RowInput:
    return RowInput(row, position, [0] * num_tokens, 1, first=first)


MIX = [some(3, 90, 7), some(0, 0, 40), some(1, 63, 1), some(4, 64, 17, first=5), some(2, 5, 2)]
"""Rows that decode with and without drafts, two prompts, one of them after earlier keys."""

CASES = {
    "plain": Case(),
    "one head": Case(num_kv_heads=1, num_shared=1),
    "three heads share a key head of 12": Case(num_shared=3, head_dim=12),
    "window": Case(scores=Scores(window=11)),
    "window of one": Case(scores=Scores(window=1)),
    "softcap": Case(scores=Scores(softcap=2.0, scaling=0.7)),
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    "half": Case(dtype=torch.bfloat16 if HAS_GPU else torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mix_of_prompts_and_drafts(name: str) -> None:
    attended(CASES[name], MIX)


def test_random_passes() -> None:
    rng = random.Random(4)
    for _ in range(6):
        rows = rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS))
        inputs = []
        for row in rows:
            num_tokens = rng.choice([1, 1, 2, 5, 9, 16, 17, 30])
            position = rng.randint(0, MAX_LEN - num_tokens)
            inputs.append(some(row, position, num_tokens, first=rng.choice([0, position // 2])))
        attended(CASES["plain"], inputs)


def test_bits_do_not_depend_on_the_other_inputs() -> None:
    """Each alone, in both orders, and padded to another size."""
    for name in ("window", "half"):
        case = CASES[name]
        together = torch.split(attended(case, MIX), [len(item.tokens) for item in MIX])
        backwards = torch.split(attended(case, MIX[::-1]), [len(item.tokens) for item in MIX[::-1]])
        for item, found, other in zip(MIX, together, backwards[::-1], strict=True):
            assert torch.equal(attended(case, [item]), found)
            assert torch.equal(attended(case, [item], size=96), found)
            assert torch.equal(other, found)


@pytest.mark.gpu
@on_gpu
def test_bits_of_a_prompt_do_not_depend_on_its_chunks() -> None:
    case = CASES["plain"]
    whole = attended(case, [some(2, 0, 80)])
    chunks = [some(2, 0, 20), some(2, 20, 43), some(2, 63, 17)]
    assert torch.equal(torch.cat([attended(case, [chunk]) for chunk in chunks]), whole)


@pytest.mark.gpu
@on_gpu
def test_bits_of_drafts_are_those_of_single_tokens() -> None:
    case = CASES["plain"]
    drafts = attended(case, [some(1, 60, 9)])
    single = [attended(case, [some(1, 60 + i, 1)]) for i in range(9)]
    assert torch.equal(torch.cat(single), drafts)


def test_long_rows_by_one_program_and_by_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """With splits of 64 keys, some of which the window excludes."""
    monkeypatch.setattr(attention, "SPLIT_KEYS", 64)
    inputs = [some(3, 150, 5), some(0, 120, 30), some(1, 63, 1), some(2, 5, 2), some(4, 130, 1)]
    for case in (CASES["plain"], replace(CASES["plain"], scores=Scores(window=70))):
        divided = attended(case, inputs)
        monkeypatch.setattr(attention, "MOST_DIVIDED", 0)
        assert torch.equal(attended(case, inputs), divided)
        monkeypatch.setattr(attention, "MOST_DIVIDED", 128)


def test_trees() -> None:
    """In a row that holds 40 tokens, beside a chain. Tokens may follow the row itself, too."""
    case, rng = CASES["plain"], random.Random(2)
    for num_tokens in (2, 8, 16, 40, 64):
        tree_of_row = Tree((0, *(rng.randrange(node) for node in range(1, num_tokens))))
        tree = RowInput(1, 40, [0] * num_tokens, 1, tree=tree_of_row)
        attended(case, [tree, some(3, 9, 1)])


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 16), (3, 12)])
def test_keys_are_written_to_their_slots(num_kv_heads: int, head_dim: int) -> None:
    """From views, as models with joined products pass them."""
    torch.manual_seed(0)
    slots = torch.tensor([3, 9, 4, 40, 40], device=DEVICE)
    apart = torch.randn(5, 3, num_kv_heads, head_dim, device=DEVICE)
    keys, values = apart[:, 0].transpose(0, 1), torch.randn(num_kv_heads, 5, head_dim).to(DEVICE)
    keys[:, 3] = keys[:, 4]
    values[:, 3] = values[:, 4]
    found, expected = torch.zeros(2, 2, 41, num_kv_heads, head_dim, device=DEVICE).half()
    attention.write(keys, values, *found, slots)
    write_plainly(keys, values, *expected, slots)
    assert torch.equal(found, expected)
    assert int((found[:, 40] != 0).sum()) > 0
