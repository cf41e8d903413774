"""The generated pages of docs/reference are what the code says."""

import re

import pytest

from smartspec_cli.reference import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_has(name: str) -> None:
    """Otherwise: python -m smartspec_cli.reference"""
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name]()


def test_every_key_and_option_has_a_meaning() -> None:
    for name in ("command-line.md", "engine-json.md"):
        items = re.findall(r"^- `.*(?:\n  .*)*", PAGES[name](), re.MULTILINE)
        assert not [item for item in items if not re.search(r"[`)]:\s+\S", item)]


def test_lines_are_short() -> None:
    for name in ("command-line.md", "engine-json.md"):
        assert max(map(len, PAGES[name]().splitlines())) <= 100
