"""The virtual environment of the transformers engine: where it lies, and how it is made.

``python -m tests.engines.place`` makes it and prints its path, as .ci/run does before the tests. It is made once for
each content of requirements.txt and interpreter, below .cache/engines or $LAMPLIGHTER_ENGINE_CACHE, by one process at a
time; takes 1.2 GB and two minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
PIP_INSTALL = ["-m", "pip", "install", "--quiet", "--no-input", "--only-binary=:all:", "--no-deps"]
CHECK = (
    "import accelerate, torch, transformers.cli.transformers; "
    "assert torch.version.cuda is None, 'this torch was built for CUDA'"
)


class NotBuildable(Exception):
    """The environment cannot be made on this machine; the message says why."""


def cache_directory() -> Path:
    return Path(os.environ.get("LAMPLIGHTER_ENGINE_CACHE") or HERE.parent.parent / ".cache/engines").resolve()


def transformers_venv() -> Path:
    """The environment's path, made now if it is not there. Raises NotBuildable."""
    wanted = REQUIREMENTS.read_bytes() + platform.python_version().encode()
    venv = cache_directory() / f"transformers-{hashlib.sha256(wanted).hexdigest()[:12]}"
    venv.parent.mkdir(parents=True, exist_ok=True)
    with venv.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / "complete").exists():
            build(venv)
    return venv


def build(venv: Path) -> None:
    python = str(venv / "bin/python")
    shutil.rmtree(venv, ignore_errors=True)
    steps = {
        "making a virtual environment": [getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(venv)],
        "installing": [python, *PIP_INSTALL, "-r", str(REQUIREMENTS)],
        "importing": [python, "-c", CHECK],
    }  # fmt: skip
    for step, words in steps.items():
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-2:])
            raise NotBuildable(f"{step} the transformers environment failed: {last}")
    (venv / "complete").touch()


if __name__ == "__main__":
    try:
        print(transformers_venv())
    except NotBuildable as reason:
        sys.exit(f"{reason}")
