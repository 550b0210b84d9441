"""The environment in other people's programs: a real LLM server's worker, and agents that bring their own start-up."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.layout import ReleaseDirectory
from lamplighter.node.start import startup
from lamplighter.node.variables import live
from lamplighter.node.variables.before import Proof, prove_before
from lamplighter.release.engine import load_engine
from tests.driver import free_port
from tests.engines.place import HERE, PIP_INSTALL, cache_directory
from tests.engines.test_transformers import READY, SECONDS
from tests.node.living import session_members
from tests.unit.test_release import release
from tests.unit.test_release_launch import place

pytestmark = pytest.mark.timeout(900)

PROJECT = Path(__file__).parents[2]
Require = Callable[[str, "str | None"], None]
AGENTS = HERE / "agents.txt"
PLAN: dict[str, Any] = {"NCCL_PROTO": "LL", "OMP_NUM_THREADS": {"value": "1", "mode": "force"}, "HF_HUB_OFFLINE": "1"}


def test_the_real_worker_of_transformers_is_proven(transformers_engine: Path, tiny_model: Path, tmp_path: Path) -> None:
    python = transformers_engine / "bin/python"
    built = release(env=PLAN, python=str(python), secrets={})
    launch = place(built, tmp_path / built.digest)
    engine = load_engine("transformers", PROJECT / "roles").compiled
    (launch.parent / "plan.json").write_text(json.dumps({"server": built.manifest["server"], "engine": engine}))
    (launch.parent / "env").write_text("export CUDA_VISIBLE_DEVICES=''\n")
    records, log = tmp_path / "records", tmp_path / "server.log"
    records.mkdir()
    words = [launch, transformers_engine / "bin/transformers", "serve", tiny_model, "--device", "cpu"]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LAMPLIGHTER_RECORDS": str(records)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, "--port", str(free_port())],
            env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until_ready(process, log)
        members = session_members(process.pid)
        workers = live.workers_of(members, set(), engine, process.pid)
        expected = live.expected_of(ReleaseDirectory(str(launch.parent)))
        proof = live.prove_live(workers, expected, str(records), engine, lambda: None)
        assert proof.message == "1/1 workers carry 4/4 variables"
        assert proof.workers[0].witness == "memory"
    finally:
        process.kill()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while READY not in (said := log.read_text(errors="replace")):
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


# -- agents that come with a sitecustomize of their own


@pytest.fixture(scope="session")
def agents(require: Require) -> Path:
    """A venv with ddtrace, OpenTelemetry and uv from PyPI, made once for each list and interpreter."""
    wanted = AGENTS.read_bytes() + platform.python_version().encode()
    venv = cache_directory() / f"agents-{hashlib.sha256(wanted).hexdigest()[:12]}"
    venv.parent.mkdir(parents=True, exist_ok=True)
    with venv.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / "complete").exists():
            base = getattr(sys, "_base_executable", sys.executable)
            for words in (
                [base, "-m", "venv", str(venv)],
                [str(venv / "bin/python"), *PIP_INSTALL, "-r", str(AGENTS)],
            ):
                done = subprocess.run(
                    words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=600
                )
                if done.returncode:
                    require(
                        "engine", f"the agents cannot be installed: {(done.stderr.strip().splitlines() or [''])[-1]}"
                    )
            (venv / "complete").touch()
    return venv


def bootstrap(agents: Path, kind: str) -> Path:
    pattern = {"ddtrace": "ddtrace/bootstrap", "opentelemetry": "opentelemetry/instrumentation/auto_instrumentation"}
    (found,) = agents.glob(f"lib/python*/site-packages/{pattern[kind]}/sitecustomize.py")
    return found.parent


def prove_beside(agents: Path, kind: str, first: str, directory: Path) -> tuple[Proof, str]:
    """Put an agent's directory before or behind ours; return the proof and what ran in a start of the same kind."""
    theirs = bootstrap(agents, kind)
    launch = place(release(env=PLAN), directory / "release")
    python = agents / "bin/python"
    environ = {"PATH": "/usr/bin:/bin", "DD_TRACE_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false",
               "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "OTEL_TRACES_EXPORTER": "none"}  # fmt: skip
    if first == "ours":
        environ["PYTHONPATH"] = str(theirs)
        words = [str(python)]
    else:  # an operator's injection into the container: in front of whatever the launch script says
        wrapper = directory / "python-with-agent"
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{theirs}:$PYTHONPATH" exec {python} "$@"\n')
        wrapper.chmod(0o755)
        words = [str(wrapper)]
    proof = prove_before(
        str(launch), words, {name: value if isinstance(value, str) else value["value"] for name, value in PLAN.items()},
        300.0, environ=environ,
    )  # fmt: skip
    code = "import sys; print(' '.join(name for name in sys.modules if name.startswith(('ddtrace', 'opentelemetry'))))"
    ran = subprocess.run([launch, *words, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return proof, ran.stdout


@pytest.mark.parametrize("kind", ["ddtrace", "opentelemetry"])
def test_with_ours_first_both_run(agents: Path, tmp_path: Path, kind: str) -> None:
    proof, ran = prove_beside(agents, kind, "ours", tmp_path)
    assert proof.ok, proof.message
    assert kind in ran


def test_ddtrace_first_chains_to_ours(agents: Path, tmp_path: Path) -> None:
    proof, ran = prove_beside(agents, "ddtrace", "theirs", tmp_path)
    assert proof.ok, proof.message
    assert "ddtrace" in ran


def test_opentelemetry_first_does_not_chain_and_is_named(agents: Path, tmp_path: Path) -> None:
    proof, ran = prove_beside(agents, "opentelemetry", "theirs", tmp_path)
    file = os.path.join(bootstrap(agents, "opentelemetry"), "sitecustomize.py")
    assert not proof.ok
    assert f"shadowed by {file}" in proof.message
    assert "opentelemetry" in ran


# -- the same by `uv run`


@pytest.mark.parametrize("more", [[], ["-I"]])
def test_a_real_uv_run_is_followed_to_its_python_and_flags(agents: Path, tmp_path: Path, more: list[str]) -> None:
    project, launch = tmp_path / "project", place(release(env=PLAN), tmp_path / "release")
    project.mkdir()
    (project / "pyproject.toml").write_text('[project]\nname = "server"\nversion = "1"\nrequires-python = ">=3.9"\n')
    base = os.path.realpath(agents / "bin/python")
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "UV_OFFLINE": "1", "UV_PYTHON": base}
    server = [agents / "bin/uv", "run", "--project", project, "--", "python", *more, "-m", "sglang.launch_server"]
    words = startup.interpreter_of(list(map(str, server)), "/usr/bin:/bin")
    told = startup.ask(words, environ)
    assert (told.prefix, told.is_venv, list(told.flags[:1])) == (str(project / ".venv"), True, more)
    expected = {name: value if isinstance(value, str) else value["value"] for name, value in PLAN.items()}
    proof = prove_before(str(launch), words, expected, 60.0, environ=environ)
    assert proof.ok == (not more), proof.message
    assert proof.ok or "Python runs with -I" in proof.message
