"""The virtual environments of the real engines: where they lie, and how they are made.

``python -m tests.engines.place`` makes it and prints its path, as .ci/run does before the tests. It is made once for
each content of requirements.txt and interpreter, below .cache/engines or $LAMPLIGHTER_ENGINE_CACHE, by one process at a
time; takes 1.2 GB and two minutes. With the argument ``vllm`` the same for vLLM: 3.4 GB, and opt-in, since its tests
take longer than CI has.
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
VLLM_REQUIREMENTS = HERE / "requirements-vllm.txt"
PIP_INSTALL = ["-m", "pip", "install", "--quiet", "--no-input", "--only-binary=:all:", "--no-deps"]
CHECK = (
    "import accelerate, torch, transformers.cli.transformers; "
    "assert torch.version.cuda is None, 'this torch was built for CUDA'"
)


#: vLLM takes its platform from the version of a distribution of this name: without it, it would look for a GPU build.
VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
VLLM_CHECK = "import torch; assert torch.version.cuda is None, 'this torch was built for CUDA'; import vllm"


class NotBuildable(Exception):
    """The environment cannot be made on this machine; the message says why."""


def cache_directory() -> Path:
    return Path(os.environ.get("LAMPLIGHTER_ENGINE_CACHE") or HERE.parent.parent / ".cache/engines").resolve()


def transformers_venv() -> Path:
    """The environment's path, made now if it is not there. Raises NotBuildable."""
    return made("transformers", REQUIREMENTS, CHECK)


def vllm_venv() -> Path:
    """The same for vLLM."""
    return made("vllm", VLLM_REQUIREMENTS, VLLM_CHECK)


def made(name: str, requirements: Path, check: str) -> Path:
    wanted = requirements.read_bytes() + platform.python_version().encode()
    venv = cache_directory() / f"{name}-{hashlib.sha256(wanted).hexdigest()[:12]}"
    venv.parent.mkdir(parents=True, exist_ok=True)
    with venv.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / "complete").exists():
            build(name, venv, requirements, check)
    return venv


def build(name: str, venv: Path, requirements: Path, check: str) -> None:
    python = str(venv / "bin/python")
    shutil.rmtree(venv, ignore_errors=True)
    steps = {
        "making a virtual environment": [getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(venv)],
        "installing": [python, *PIP_INSTALL, "-r", str(requirements)],
        "importing": [python, "-c", check],
    }  # fmt: skip
    for step, words in steps.items():
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-2:])
            raise NotBuildable(f"{step} the {name} environment failed: {last}")
        if name == "vllm" and step == "installing":
            site = next((venv / "lib").glob("python*/site-packages")) / "vllm-0.32.0+cpu.dist-info"
            site.mkdir(exist_ok=True)
            (site / "METADATA").write_text(VLLM_METADATA)
    (venv / "complete").touch()


if __name__ == "__main__":
    try:
        print(vllm_venv() if sys.argv[1:] == ["vllm"] else transformers_venv())
    except NotBuildable as reason:
        sys.exit(f"{reason}")
