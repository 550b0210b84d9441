"""The virtual environments of the real engines: where they lie, and how they are made.

``python -m tests.engines.place`` makes the one of transformers and prints its path, with the argument ``vllm`` that of
vLLM, with ``ansible`` that of ansible-core, as .ci/run does, with ``peers`` what tests/perf/peers measures beside us.
Each is made once for each content of its requirements and
interpreter, below .cache/engines or $LAMPLIGHTER_ENGINE_CACHE, by one process at a time; who asks meanwhile waits for
it. transformers: 1.2 GB, two minutes; vLLM: 2.2 GB, two and a half.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PIP_INSTALL = ["-m", "pip", "install", "--quiet", "--no-input", "--only-binary=:all:", "--no-deps"]


class NotBuildable(Exception):
    """The environment cannot be made on this machine; the message says why."""


@dataclass(frozen=True)
class Environment:
    """What is installed, and the imports that show that it works.

    ``metadata``: (name, version) of a distribution that is only said to be there. ``options`` go to pip.
    """

    name: str
    requirements: Path
    check: str
    metadata: tuple[str, str] | None = None
    options: tuple[str, ...] = ()

    @property
    def place(self) -> Path:
        wanted = self.requirements.read_bytes() + platform.python_version().encode()
        return cache_directory() / f"{self.name}-{hashlib.sha256(wanted).hexdigest()[:12]}"

    @property
    def is_made(self) -> bool:
        return (self.place / "complete").exists()


NO_CUDA = "import torch; assert torch.version.cuda is None, 'this torch was built for CUDA'; import "
TRANSFORMERS = Environment(
    "transformers", HERE / "requirements.txt", f"{NO_CUDA}accelerate, transformers.cli.transformers"
)
#: What a start of vLLM imports, or nearly all of it.
VLLM_MODULES = (
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "model_hosting_container_standards.sagemaker",
    "uvicorn.protocols.http.auto",
)
VLLM = Environment(
    "vllm",
    HERE / "requirements-vllm.txt",
    NO_CUDA + ", ".join(VLLM_MODULES),
    # vLLM takes its platform from the version of a distribution of this name: without it, it looks for a GPU build.
    metadata=("vllm", "0.32.0+cpu"),
    # Most of it is never imported here; the check compiles what is, for nodes see all of this read-only.
    options=("--no-compile",),
)

#: No engine, but the same kind of thing: it says what an inventory means.
ANSIBLE = Environment("ansible", HERE.parent / "oracle/requirements.txt", "import ansible.inventory.manager")

#: The tools that tests/perf/peers measures us beside.
PEERS = Environment("peers", HERE.parent / "perf/peers/requirements.txt", "import ansible, ansible_mitogen, pyinfra")


def cache_directory() -> Path:
    return Path(os.environ.get("LAMPLIGHTER_ENGINE_CACHE") or HERE.parent.parent / ".cache/engines").resolve()


def made(environment: Environment) -> Path:
    """The environment's path, made now if it is not there. Raises NotBuildable."""
    venv = environment.place
    venv.parent.mkdir(parents=True, exist_ok=True)
    with venv.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not environment.is_made:
            build(environment, venv)
    return venv


def build(environment: Environment, venv: Path) -> None:
    python = str(venv / "bin/python")
    shutil.rmtree(venv, ignore_errors=True)
    base = getattr(sys, "_base_executable", sys.executable)
    perform(environment, "making a virtual environment", [base, "-m", "venv", str(venv)])
    words = [python, *PIP_INSTALL, *environment.options, "-r", str(environment.requirements)]
    perform(environment, "installing", words)
    if environment.metadata is not None:
        say_installed(venv, *environment.metadata)
    perform(environment, "importing", [python, "-c", environment.check])
    (venv / "complete").touch()


def perform(environment: Environment, step: str, words: list[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        words, env=environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )  # fmt: skip
    if done.returncode != 0:
        last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-2:])
        raise NotBuildable(f"{step} the {environment.name} environment failed: {last}")


def say_installed(venv: Path, name: str, version: str) -> None:
    directory = next((venv / "lib").glob("python*/site-packages")) / f"{name}-{version}.dist-info"
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


if __name__ == "__main__":
    try:
        print(made({"vllm": VLLM, "ansible": ANSIBLE, "peers": PEERS}.get("".join(sys.argv[1:]), TRANSFORMERS)))
    except NotBuildable as reason:
        sys.exit(f"{reason}")
