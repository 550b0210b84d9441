"""Which Python a command line starts, and what that Python says of itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lamplighter.node.start import startup
from lamplighter.node.start.startup import NoPython, interpreter_of
from lamplighter.node.variables.before import prove_before
from tests.unit.test_release import release
from tests.unit.test_release_launch import place

BARE = {"PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("/opt/v/bin/python -m sglang.launch_server --port 1", "/opt/v/bin/python"),
        ("python3.12 -I /srv/x.py -E", "python3.12 -I"),
        ("python -X dev -W error -u -c pass", "python -X dev -W error -u"),
        ("python -Im vllm", "python -I"),
        ("python -Ec pass", "python -E"),
        ("python -Werror -Xutf8 x.py", "python -Werror -Xutf8"),
        ("python", "python"),
        ("env -u A B=1 python -I x.py", "env -u A B=1 python -I"),
        ("/usr/bin/env -i PYTHONPATH=/x -C /srv python3 -m x", "/usr/bin/env -i PYTHONPATH=/x -C /srv python3"),
        ("/usr/bin/env -S python3 -E x.py", "python3 -E"),
        ("sudo -n -u llm A=1 /opt/v/bin/python -m x", "sudo -n -u llm A=1 /opt/v/bin/python"),
        ("uv run python -I x.py", "uv run python -I"),
        ("uv run --project /srv --no-sync -- sglang serve m", "uv run --project /srv --no-sync python"),
        ("uv run --with torch -m vllm.entrypoints", "uv run --with torch python"),
        ("/opt/bin/uv run x.py", "/opt/bin/uv run python"),
    ],
)
def test_the_words_that_start_python(argv: str, words: str) -> None:
    assert interpreter_of(argv.split(), "/nowhere") == words.split()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("/opt/v/bin/python-dbg -I -m x", "/opt/v/bin/python-dbg -I"),
        ("{true} --membind 0 /opt/v/bin/python-dbg -E x.py", "/opt/v/bin/python-dbg -E"),
        ("env A=1 {true} /opt/v/bin/python-dbg", "env A=1 /opt/v/bin/python-dbg"),
    ],
)
def test_the_inventorys_python_is_known_by_any_name_and_behind_any_program(argv: str, words: str) -> None:
    """numactl, nice and their like are programs that name no Python themselves."""
    argv = argv.format(true=shutil.which("true"))
    assert interpreter_of(argv.split(), "/nowhere", "/opt/v/bin/python-dbg") == words.split()
    with pytest.raises(NoPython):
        interpreter_of(argv.split(), "/nowhere", "/opt/other/python-dbg")


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("#!/opt/v/bin/python\n", ["/opt/v/bin/python"]),
        ("#!/opt/v/bin/python3.12 -I\n", ["/opt/v/bin/python3.12", "-I"]),
        ("#! /usr/bin/env python3\n", ["python3"]),
        ("#!/usr/bin/env -S python3 -E\n", ["python3", "-E"]),
        ("#!/usr/bin/env -S PYTHONSAFEPATH=1 python3\n", ["/usr/bin/env", "PYTHONSAFEPATH=1", "python3"]),
        ("#!/bin/sh\n'''exec' \"/a long/v/bin/python\" \"$0\" \"$@\"\n' '''\n", ["/a long/v/bin/python"]),
        ("#!/bin/sh\n'''exec' /v/bin/python -I \"$0\" \"$@\"\n' '''\n", ["/v/bin/python", "-I"]),
    ],
)
def test_a_console_scripts_first_line(tmp_path: Path, head: str, words: list[str]) -> None:
    (tmp_path / "vllm").write_text(head + "import x\n")
    (tmp_path / "vllm").chmod(0o755)
    assert interpreter_of([str(tmp_path / "vllm"), "serve"], "/nowhere") == words
    assert interpreter_of(["vllm", "serve"], f"/nowhere:{tmp_path}") == words


@pytest.mark.parametrize("content", [b"\x7fELF\0\xff", b"", b"#!/bin/sh\nexec python x\n", b"no first line\n"])
def test_what_names_no_python_is_said_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "server").write_bytes(content)
    (tmp_path / "server").chmod(0o755)
    for argv in ([str(tmp_path / "server")], ["gone"], [str(tmp_path / "gone")], [], ["uvx", "vllm"]):
        with pytest.raises(NoPython):
            interpreter_of(argv, str(tmp_path))


@pytest.mark.parametrize("runner", ["conda", "micromamba", "poetry", "pixi"])
def test_a_runner_of_environments_is_not_asked_in_the_place_of_the_one_it_chooses(tmp_path: Path, runner: str) -> None:
    """Conda is a console script of its base environment, where no engine is."""
    (tmp_path / runner).write_text("#!/opt/base/bin/python\n")
    (tmp_path / runner).chmod(0o755)
    words = [runner, "run", "-n", "llm", "python", "-m", "vllm"]
    with pytest.raises(NoPython, match=f"{runner} chooses the environment itself"):
        interpreter_of(words, str(tmp_path), "/opt/llm/bin/python")


def test_a_python_tells_its_prefix_flags_and_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    told = startup.ask([str(python), "-I"], {**BARE, "PYTHONPATH": "/nowhere"})
    assert (told.prefix, told.flags[0], told.sitecustomize) == (str(tmp_path / "venv"), "-I", None)
    assert told.is_venv
    own = Path(told.packages) / "sitecustomize.py"
    own.write_text("print('noise')")
    told = startup.ask([str(python)], BARE)
    assert (told.sitecustomize, told.candidates, told.flags) == (str(own), (str(own),), ())
    assert startup.needed_scope(told).scope == "server"
    assert startup.needed_scope(startup.ask([str(python), "-S"], BARE)).scope is None
    assert startup.needed_scope(startup.ask([str(python), "-E"], BARE)).scope == "pth"


def test_a_python_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(NoPython, match="No such file"):
        startup.ask([str(tmp_path / "gone")], BARE)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no libpython >&2; exit 127\n")
    broken.chmod(0o755)
    with pytest.raises(NoPython, match="no libpython"):
        startup.ask([str(broken)], BARE)
    broken.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(NoPython, match=r"within 0\.2 s"):
        startup.ask([str(broken)], BARE, 0.2)


def test_a_python_tells_what_it_is_in_the_servers_own_environment(tmp_path: Path) -> None:
    """A sitecustomize on the inventory's PYTHONPATH is the one that runs; stdout is theirs, and held open for ever."""
    own = tmp_path / "sitecustomize.py"
    own.write_text(
        "import os, subprocess, sys\nprint('noise without an end', end='')\nos.closerange(3, 64)\n"
        f"p = subprocess.Popen(['/bin/sleep', '600'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\n"
    )
    try:
        told = startup.ask([sys.executable], {**BARE, "PYTHONPATH": str(tmp_path)})
        assert told.sitecustomize == str(own) == told.candidates[0]
        assert startup.ask([sys.executable, "-I"], {**BARE, "PYTHONPATH": str(tmp_path)}).sitecustomize != str(own)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)


@pytest.mark.skipif(not shutil.which("sudo") or os.geteuid() != 0, reason="node: sudo needs root here")
def test_a_python_behind_sudo_tells_too() -> None:
    told = startup.ask(["sudo", "-n", "-u", "nobody", "/usr/bin/python3"], BARE)
    assert told.prefix == "/usr"


# -- the proof, by the real command line


def test_the_proof_takes_the_flags_of_a_console_script(tmp_path: Path) -> None:
    launch = place(release(env={"NCCL_PROTO": "LL"}), tmp_path / "release")
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable} -I\n")
    script.chmod(0o755)
    proof = prove_before(str(launch), interpreter_of([str(script)], ""), {"NCCL_PROTO": "LL"}, 30, environ=BARE)
    assert "Python runs with -I" in proof.message


@pytest.mark.skipif(not shutil.which("sudo") or os.geteuid() != 0, reason="node: sudo needs root here")
@pytest.mark.parametrize(("more", "ok"), [([], False), (["--preserve-env=NCCL_PROTO,PYTHONPATH"], True)])
def test_what_sudo_drops_is_said_to_be_dropped_by_sudo(tmp_path: Path, more: list[str], ok: bool) -> None:
    """facts: plain sudo drops all; a list of names keeps them."""
    launch = place(release(env={"NCCL_PROTO": "LL"}), tmp_path / "release")
    words = interpreter_of(["sudo", "-n", *more, sys.executable, "-m", "sglang.launch_server"], "")
    proof = prove_before(str(launch), words, {"NCCL_PROTO": "LL"}, 30, environ=BARE)
    assert proof.ok == ok, proof.message
    assert ok or "dropped by sudo" in proof.message
