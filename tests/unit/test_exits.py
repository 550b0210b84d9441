"""The exit codes are one table; the README shows it."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from lamplighter.exits import MEANINGS, meaning_of
from lamplighter.node.events import Exit

README = Path(__file__).resolve().parents[2] / "README.md"


def test_each_code_has_a_meaning() -> None:
    assert list(MEANINGS) == list(Exit)
    assert all(meaning.words for meaning in MEANINGS.values())


def test_the_readme_shows_the_table() -> None:
    rows = re.findall(r"^\| (\d[\d, ]*) \| (.*?) \| (.*?) ?\|$", README.read_text(), re.MULTILINE)
    told = groupby(MEANINGS.items(), key=lambda item: (item[1].words, item[1].to_do))
    assert rows == [(", ".join(str(int(code)) for code, _ in codes), *words) for words, codes in told]


def test_a_code_of_a_newer_node_is_a_failure_without_a_next_step() -> None:
    assert (meaning_of(77).outcome, meaning_of(77).next_step) == ("failed", "")
