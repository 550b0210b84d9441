"""What the tests of the node side share: processes that are surely ended, and the runner as it lies on a node."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamplighter.run.payload import pack
from tests.node.living import Living


@pytest.fixture
def living() -> Iterator[Living]:
    kept = Living()
    try:
        yield kept
    finally:
        kept.end()


@pytest.fixture(scope="session")
def runner_home() -> Iterator[str]:
    """The node side, unpacked where every user of this machine can read it."""
    directory = Path(tempfile.mkdtemp(prefix="lamplighter-runner-"))
    zipfile.ZipFile(io.BytesIO(pack().data)).extractall(directory)
    os.chmod(directory, 0o755)
    for path in directory.rglob("*"):
        os.chmod(path, 0o755 if path.is_dir() else 0o644)
    yield str(directory)
    shutil.rmtree(directory)


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every user may enter and use, like /tmp: tmp_path is the tester's alone."""
    directory = Path(tempfile.mkdtemp(prefix="lamplighter-open-"))
    os.chmod(directory, 0o1777)
    yield directory
    shutil.rmtree(directory)
