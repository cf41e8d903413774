"""The generated parts of the documentation are what the code says."""

import re
from pathlib import Path

import pytest

from smartspec_cli.reference import PAGES, PARTS, generated


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_is_what_the_code_has(path: Path) -> None:
    """Otherwise: python -m smartspec_cli.reference"""
    page = path.read_text(encoding="utf-8")
    assert page == generated(page)


@pytest.mark.parametrize("name", ["commands", "keys", "fields"])
def test_every_key_and_option_has_a_meaning(name: str) -> None:
    items = re.findall(r"^- `.*(?:\n  .*)*", PARTS[name](), re.MULTILINE)
    assert items
    assert not [item for item in items if not re.search(r"[`)]:\s+\S", item)]
