"""The table of constants in docs/research/control.md, and that each setting of core/ has a
reason."""

import pytest

from studies.constants import PAGE, constants, page


def test_the_table_is_what_the_code_has() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run scripts/study constants"


def test_numbers_are_found_with_their_reasons() -> None:
    source = '''
SIZE = 64
"""Of a
table."""
LEAST = -1e-9
NAME = "no number"

class SomeSettings:
    share: float = 0.01
    """Of | all."""
    pairs: tuple = ((1.0, 2.0), (3.0, 4.0))
    """Of each."""
'''
    assert list(constants(source, "some")) == [
        ("some.SIZE", "64", "Of a table."),
        ("some.LEAST", "-1e-09", ""),
        ("SomeSettings.share", "0.01", "Of \\| all."),
        ("SomeSettings.pairs", "((1.0, 2.0), (3.0, 4.0))", "Of each."),
    ]
    with pytest.raises(ValueError, match="share has no reason"):
        list(constants("class SomeSettings:\n    share: float = 0.5\n", "some"))
