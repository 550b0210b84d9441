"""The packed node side: the same everywhere, named by its content, and runnable as it is."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lamplighter.run import payload
from lamplighter.run.payload import boot_source, pack


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in place of ours."""
    node = tmp_path / "lamplighter" / "node"
    (node / "system").mkdir(parents=True)
    (node / "system" / "z.py").write_text("Z = 1\n")
    (node / "a.py").write_text("A = 'é'\n", encoding="utf-8")
    (node / "boot.py").write_text("never packed\n")
    (node / "notes.txt").write_text("never packed\n")
    monkeypatch.setattr(payload, "PACKAGE", tmp_path / "lamplighter")
    monkeypatch.setattr(payload, "BOOT", node / "boot.py")
    return node


def fresh() -> payload.Runner:
    pack.cache_clear()
    try:
        return pack()
    finally:
        pack.cache_clear()


def boot_digest(directory: Path) -> str:
    """Ask the boot program itself, as it stands: it is never imported."""
    source = payload.BOOT.read_text()
    head = source[: source.index("request = ")]
    space: dict[str, Any] = {"NONCE": "n"}
    before = os.umask(0o022)
    try:
        exec(compile(head, "boot", "exec"), space)
    finally:
        os.umask(before)
    return str(space["digest_of"](str(directory)))


def unpack(packed: payload.Runner, directory: Path) -> Path:
    zipfile.ZipFile(io.BytesIO(packed.data)).extractall(directory)
    return directory


def test_the_node_computes_the_digest_that_we_send(tmp_path: Path) -> None:
    packed = pack()
    home = unpack(packed, tmp_path / "home")
    assert len(packed.digest) == 64
    assert boot_digest(home) == packed.digest
    (home / "lamplighter" / "__pycache__").mkdir()
    (home / "lamplighter" / "__pycache__" / "x.pyc").write_bytes(b"bytecode")
    assert boot_digest(home) == packed.digest


@pytest.mark.parametrize("damage", ["cut", "extra", "missing", "changed", "renamed"])
def test_every_damage_changes_the_digest(tmp_path: Path, damage: str) -> None:
    home = unpack(pack(), tmp_path / "home")
    victim = home / "lamplighter" / "node" / "journal.py"
    data = victim.read_bytes()
    if damage == "cut":
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "extra":
        victim.with_name("extra.py").write_bytes(b"")
    elif damage == "missing":
        victim.unlink()
    elif damage == "changed":
        victim.write_bytes(data.replace(b"journal", b"journey", 1))
    else:
        victim.rename(victim.with_name("diary.py"))
    assert boot_digest(home) != pack().digest


def test_the_same_source_gives_the_same_bytes(package: Path) -> None:
    first = fresh()
    (package / "a.py").touch()
    assert fresh() == first
    (package / "a.py").write_text("A = 'e'\n", encoding="utf-8")
    assert fresh().digest != first.digest


def test_what_is_packed(package: Path) -> None:
    names = zipfile.ZipFile(io.BytesIO(fresh().data)).namelist()
    assert names == ["__main__.py", "lamplighter/__init__.py", "lamplighter/node/a.py", "lamplighter/node/system/z.py"]


@pytest.mark.node
def test_the_packed_program_imports_nothing_outside_itself_and_the_library(tmp_path: Path) -> None:
    """Unpacked elsewhere, with neither the project nor its dependencies in reach."""
    home = unpack(pack(), tmp_path / "home")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from lamplighter.node import __main__\n"
        "places = {name: getattr(one, '__file__', None) or '' for name, one in sys.modules.items()}\n"
        "assert places['lamplighter.node.events'].startswith(sys.argv[1])\n"
        "assert not any('site-packages' in place for place in places.values())\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(home)], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_boot_program_begins_with_its_nonce() -> None:
    first, _, rest = boot_source("ab12").partition(b"\n")
    assert first == b"NONCE = 'ab12'"
    assert rest == payload.BOOT.read_bytes()
