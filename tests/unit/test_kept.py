"""Kept results: the same inputs are worked out once, and nothing but what we wrote ourselves is believed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lamplighter.kept import MOST, kept


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/lamplighter"


class Work:
    """Something that is worked out, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> dict[str, int]:
        self.times += 1
        return {"worth": 7}


def asked(work: Work, file: Path, said: object = "a") -> int:
    assert kept("kind", said, [file], work) == {"worth": 7}
    return work.times


def test_the_same_is_worked_out_once_and_anything_else_anew(place: Path, tmp_path: Path) -> None:
    file, work = tmp_path / "file", Work()
    file.write_text("one")
    assert [asked(work, file), asked(work, file)] == [1, 1]
    assert asked(work, file, "b") == 2
    file.write_text("two")
    assert asked(work, file) == 3
    file.write_text("one")
    assert asked(work, file) == 3
    moved = file.rename(tmp_path / "elsewhere")
    assert asked(work, moved) == 4


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def reverse(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"7", b"8"))


def link(file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to("other")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def hand_over(file: Path) -> None:
    os.chmod(file, 0o622)


def wait(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("spoil", [shorten, reverse, link, empty, hand_over, wait])
def test_what_is_not_as_we_wrote_it_is_passed_over(place: Path, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    file, work = tmp_path / "file", Work()
    file.touch()
    asked(work, file)
    (found,) = place.iterdir()
    spoil(found)
    assert [asked(work, file), asked(work, file)] == [2, 2], "and it is put right"


def others_write(place: Path) -> None:
    place.mkdir(parents=True)
    place.chmod(0o777)


def is_a_link(place: Path) -> None:
    place.parent.mkdir()
    place.symlink_to(place.parent)


def is_a_file(place: Path) -> None:
    place.parent.mkdir()
    place.touch()


@pytest.mark.parametrize("spoil", [others_write, is_a_link, is_a_file])
def test_a_place_that_is_not_ours_alone_keeps_nothing(
    place: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    file, work = tmp_path / "file", Work()
    file.touch()
    spoil(place)
    assert [asked(work, file), asked(work, file)] == [1, 2]
    assert not list(tmp_path.rglob("kind-*"))


def test_a_file_that_cannot_be_read_is_left_to_the_work(place: Path, tmp_path: Path) -> None:
    work = Work()
    assert [asked(work, tmp_path / "none"), asked(work, tmp_path / "none")] == [1, 2]


def test_an_error_is_not_kept(place: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("luck")

    for _ in range(2):
        with pytest.raises(KeyError, match="luck"):
            kept("kind", "a", [], fail)
    assert not list(place.glob("*"))


def test_only_what_was_used_last_is_kept(place: Path, tmp_path: Path) -> None:
    work, file = Work(), tmp_path / "file"
    file.touch()
    for number in range(1, MOST + 2):
        asked(work, file, 0)
        asked(work, file, number)
    assert len(list(place.iterdir())) == MOST
    assert asked(work, file, 0) == work.times == MOST + 2, "it was used all the time"
    assert asked(work, file, 1) == MOST + 3
