"""The environment proof against real interpreters: what arrives, what does not, and who is to blame."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamplighter.node.stages import environment
from lamplighter.node.variables import before
from lamplighter.node.variables.before import SECRET, Proof, prove_before
from lamplighter.node.variables.live import Expected
from lamplighter.node.worker import StageFailure
from tests.unit.test_release import release
from tests.unit.test_release_launch import NASTY, place

PROJECT = Path(__file__).parents[2]
PYTHONS = [*sorted(glob.glob("/root/.pyenv/versions/3*/bin/python")), "/usr/bin/python3"]
PYTHONS = [path for path in PYTHONS if os.access(path, os.X_OK)] or [sys.executable]
PLAN: dict[str, Any] = {"NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": {"value": "SYS", "mode": "force"}}
EXPECTED = {"NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": "SYS"}
DEADLINE = 120.0
IN_CHILD = "b'spawn_main' in open('/proc/self/cmdline', 'rb').read()"


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    return place(release(env=PLAN, python=sys.executable), tmp_path / "release")


def prove(launch: Path, *python: str | Path, expected: dict[str, str] | None = None, **options: Any) -> Proof:
    words = [str(word) for word in python] or [sys.executable]
    options = {"deadline": DEADLINE, "environ": {"PATH": "/usr/bin:/bin"}, **options}
    return prove_before(str(launch), words, EXPECTED if expected is None else expected, **options)


def start_up_file(directory: Path, text: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(text)
    return directory


def behind_ours(directory: Path, text: str) -> dict[str, str]:
    """An environment that brings another sitecustomize: ours runs first and chains to it."""
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(start_up_file(directory, text))}


def before_ours(directory: Path, text: str) -> Path:
    """An interpreter that puts another sitecustomize first, as an injecting agent does."""
    wrapper = directory.parent / "python-with-agent"
    start_up_file(directory, text)
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{directory}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < until, f"{pid} lives on"
        time.sleep(0.01)


@pytest.mark.parametrize("python", PYTHONS)
def test_all_arrives_in_every_interpreter(launch: Path, python: str) -> None:
    proof = prove(launch, python)
    assert (proof.ok, proof.differences) == (True, ()), proof.message
    assert proof.parent == proof.child == EXPECTED
    assert proof.sitecustomize == str(launch.parent / "pysite" / "sitecustomize.py") == proof.candidates[0]
    assert 0 < proof.seconds < DEADLINE


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_odd_values_compare_equal_in_any_locale(tmp_path: Path, locale: str) -> None:
    expected = {f"V{number}": value for number, value in enumerate(NASTY)}
    launch = place(release(env=expected), tmp_path / "größe; $(x)")
    proof = prove(launch, expected=expected, environ={"PATH": "/usr/bin:/bin", "LC_ALL": locale})
    assert proof.ok, proof.message
    assert proof.child == expected


def test_through_the_link_to_the_current_release(launch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "current").symlink_to(launch.parent)
    monkeypatch.chdir(tmp_path)
    assert prove(Path("current/launch.sh")).ok


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_a_flag_that_switches_ours_off_is_named(launch: Path, flag: str) -> None:
    proof = prove(launch, sys.executable, flag)
    assert not proof.ok
    assert [each.name for each in proof.differences] == ["sitecustomize"]
    assert f"with {flag}:" in proof.differences[0].reason
    assert flag in proof.message


def test_a_shadowing_file_is_named(launch: Path, tmp_path: Path) -> None:
    agent = before_ours(tmp_path / "agent", "import os; os.environ['NCCL_PROTO'] = 'Simple'")
    proof = prove(launch, agent)
    assert [each.name for each in proof.differences] == ["sitecustomize", "NCCL_PROTO"]
    assert proof.sitecustomize == str(tmp_path / "agent" / "sitecustomize.py")
    assert {each.reason for each in proof.differences} == {f"shadowed by {proof.sitecustomize}"}
    assert "NCCL_PROTO should be 'LL', is 'Simple'" in proof.message


def test_an_error_in_a_shadowing_file_is_quoted(launch: Path, tmp_path: Path) -> None:
    proof = prove(launch, before_ours(tmp_path / "agent", "raise RuntimeError('agent has no licence')"))
    assert proof.differences[0].reason == (
        f"{tmp_path}/agent/sitecustomize.py failed: RuntimeError: agent has no licence"
    )


def test_damage_in_our_own_file_is_quoted(launch: Path) -> None:
    ours = launch.parent / "pysite" / "sitecustomize.py"
    ours.write_text("def half(:\n")
    proof = prove(launch)
    assert f"{ours} failed: SyntaxError: invalid syntax" in proof.message


def test_an_exit_in_a_start_up_file_is_fatal_and_said_so(launch: Path, tmp_path: Path) -> None:
    proof = prove(launch, before_ours(tmp_path / "agent", "raise SystemExit('no licence')"))
    assert not proof.ok
    assert "died in a start-up file" in proof.message
    assert "no licence" in proof.message


def test_a_chained_file_that_overwrites_is_named_with_both_values(launch: Path, tmp_path: Path) -> None:
    environ = behind_ours(tmp_path / "old", "import os; os.environ['NCCL_P2P_LEVEL'] = 'PHB'")
    proof = prove(launch, environ=environ)
    (difference,) = proof.differences
    assert (difference.name, difference.expected, difference.parent, difference.child) == (
        "NCCL_P2P_LEVEL", "SYS", "PHB", "PHB",
    )  # fmt: skip
    assert difference.reason == f"overwritten: {tmp_path}/old/sitecustomize.py mentions it"


def test_a_change_in_the_child_alone_is_seen(launch: Path, tmp_path: Path) -> None:
    environ = behind_ours(tmp_path / "old", f"import os\nif {IN_CHILD}: del os.environ['NCCL_PROTO']")
    proof = prove(launch, environ=environ)
    (difference,) = proof.differences
    assert (difference.parent, difference.child) == ("LL", None)
    assert "is 'LL' in the server's Python and not set in its spawn child" in proof.message


def test_a_pth_file_is_named(tmp_path: Path) -> None:
    """facts: a .pth line runs before sitecustomize, so it beats a plain value and not a forced one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    line = "import os; os.environ.update(NCCL_PROTO='Simple', NCCL_P2P_LEVEL='PHB')\n# NCCL_ALGO\n"
    (packages / "fix.pth").write_text(line)
    launch = place(release(env={**PLAN, "NCCL_ALGO": "Ring"}), tmp_path / "release")
    python = tmp_path / "venv" / "bin" / "python"
    proof = prove(launch, python, expected={**EXPECTED, "NCCL_ALGO": "Tree"})
    reasons = {each.name: each.reason for each in proof.differences}
    assert reasons["NCCL_PROTO"] == f"overwritten: {packages}/fix.pth mentions it"
    assert "fix.pth" not in reasons["NCCL_ALGO"]
    assert set(reasons) == {"NCCL_PROTO", "NCCL_ALGO"}


def test_the_nodes_env_file_is_named(launch: Path) -> None:
    (launch.parent / "env").write_text("export NCCL_PROTO='Simple'\n")
    proof = prove(launch)
    assert proof.differences[0].reason == f"overwritten: {launch.parent}/env mentions it"


def test_a_variable_that_nobody_sets(launch: Path) -> None:
    proof = prove(launch, expected={**EXPECTED, "NCCL_ALGO": "Ring"})
    assert proof.message.startswith("NCCL_ALGO should be 'Ring', is not set (")


def test_a_variable_may_have_any_name_and_any_number_and_size_that_the_kernel_takes(tmp_path: Path) -> None:
    """Names that the launch script itself might use; an answer of several megabytes."""
    expected = {f"V_{number}": "模" * 900 for number in range(400)}
    names = ("here", "_here", "name", "line", "path", "IFS", "PS1", "CDPATH", "OLDPWD", "source", "channel", "mark")
    expected |= {**dict.fromkeys(names, "/x"), "V_BIG": "'" * (131072 - len("V_BIG=") - 1)}
    launch = place(release(env={name: value for name, value in expected.items() if name != "_here"}), tmp_path / "r")
    (launch.parent / "env").write_text("export TOKEN=right\nexport _here=/x\n")
    proof = prove(launch, expected={**expected, "TOKEN": "right"}, secret_names={"_here"})
    assert (proof.message, proof.ok) == ("414 variables arrive in the server's Python and in its spawn child", True)


@pytest.mark.parametrize("value", ["", ":", "/opt/plugins", "/opt/a:/opt/b"])
def test_pythonpath_of_the_inventory_arrives_behind_ours_whatever_it_is(tmp_path: Path, value: str) -> None:
    launch = place(release(env={"PYTHONPATH": value}), tmp_path / "release")
    proof = prove(launch, expected={"PYTHONPATH": value})
    assert proof.ok, proof.message


def test_pythonpath_of_the_inventory_counts_behind_ours(tmp_path: Path) -> None:
    launch = place(release(env={"PYTHONPATH": "/opt/plugins"}), tmp_path / "release")
    assert prove(launch, expected={"PYTHONPATH": "/opt/plugins"}).ok
    assert not prove(launch, expected={"PYTHONPATH": "/opt/other"}).ok


def test_a_secret_is_compared_and_never_shown(launch: Path, tmp_path: Path) -> None:
    (launch.parent / "env").write_text("HF_TOKEN=hf_right\nAPI_KEY=sk_wrong\n")
    environ = behind_ours(tmp_path / "old", "raise Exception('token is hf_right')")
    expected = {**EXPECTED, "HF_TOKEN": "hf_right", "API_KEY": "sk_right", "NO_KEY": "sk_right"}
    proof = prove(launch, expected=expected, secret_names={"HF_TOKEN", "API_KEY", "NO_KEY"}, environ=environ)
    assert [each.name for each in proof.differences] == ["API_KEY", "NO_KEY"]
    assert proof.parent["HF_TOKEN"] == SECRET
    assert proof.parent["NO_KEY"] is None
    assert not [word for word in ("hf_right", "sk_right", "sk_wrong") if word in repr(proof)]
    assert "API_KEY should be (secret), is (secret, another one)" in proof.message


@pytest.mark.parametrize("kind", ["missing", "not executable", "a directory", "launch.sh"])
def test_an_interpreter_that_cannot_start(launch: Path, tmp_path: Path, kind: str) -> None:
    python = tmp_path / "python"
    if kind == "not executable":
        python.write_text("")
    elif kind == "a directory":
        python.mkdir()
    elif kind == "launch.sh":
        launch.chmod(0o644)
    proof = prove(launch, python)
    assert not proof.ok
    assert proof.message.startswith(f"the interpreter {python} cannot be started: ")
    assert proof.message.endswith(("not found", "ermission denied", "s a directory"))


def test_what_the_launch_script_says_is_passed_on(launch: Path) -> None:
    (launch.parent / "pysite" / "sitecustomize.py").unlink()
    proof = prove(launch)
    assert "ended with status 2" in proof.message
    assert "no pysite/sitecustomize.py" in proof.message


def test_an_interpreter_that_dies_of_a_signal(launch: Path, tmp_path: Path) -> None:
    proof = prove(launch, environ=behind_ours(tmp_path / "old", "import os; os.kill(os.getpid(), 11)"))
    assert "was killed by signal 11" in proof.message


def test_a_child_that_dies(launch: Path, tmp_path: Path) -> None:
    environ = behind_ours(tmp_path / "old", f"import os\nif {IN_CHILD}:\n    os.write(2, b'sad'); os._exit(7)")
    proof = prove(launch, environ=environ)
    assert not proof.ok
    assert "started, but its spawn child did not (exit status 7): sad" in proof.message
    assert proof.parent == EXPECTED
    assert proof.child == {}


@pytest.mark.parametrize("where", ["parent", "child"])
def test_at_the_deadline_the_whole_group_is_gone(
    launch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    pids = tmp_path / "pids"

    class Clock:
        """Its time is up as soon as both processes hang."""

        @staticmethod
        def monotonic() -> float:
            hang = pids.exists() and pids.read_text().count("\n") == 2
            return time.monotonic() + (3600 if hang else 0)

    monkeypatch.setattr(before, "time", Clock)
    hang = (
        f"import os, sys, time\nif {'True' if where == 'parent' else IN_CHILD}:\n"
        f"    sys.stdout.write('thinking'); sys.stdout.flush(); child = os.fork()\n"
        f"    open({str(pids)!r}, 'a').write('%d\\n' % os.getpid())\n    time.sleep(600)"
    )
    began = time.monotonic()
    proof = prove(launch, environ=behind_ours(tmp_path / "slow", hang), deadline=200.0)
    assert time.monotonic() - began < 120
    assert not proof.ok
    assert "within 200 s; its process group was killed: thinking" in proof.message
    assert ("its spawn child gave no answer" in proof.message) == (where == "child")
    found = [int(line) for line in pids.read_text().split()]
    assert len(found) == 2
    for pid in found:
        wait_until_gone(pid)


def test_who_keeps_our_pipes_open_does_not_keep_us(launch: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    stay = (
        f"import os, time\npids = {str(pids)!r}\nif not os.path.exists(pids) and os.fork() == 0:\n"
        "    open(pids + '.part', 'w').write(str(os.getpid()))\n    os.rename(pids + '.part', pids)\n"
        "    time.sleep(600)\nwhile not os.path.exists(pids):\n    time.sleep(0.01)"
    )
    proof = prove(launch, environ=behind_ours(tmp_path / "stays", stay))
    assert proof.ok, proof.message
    wait_until_gone(int(pids.read_text()))


@pytest.mark.parametrize("ends", [True, False])
def test_who_closes_all_descriptors_and_opens_others_does_no_harm(launch: Path, tmp_path: Path, ends: bool) -> None:
    """As sudo does, and daemons that tidy up: then the answer comes on stdout, and a secret is not in what was said."""
    (launch.parent / "env").write_text('export HF_TOKEN="hf_\\"right"\n')
    files = f"[open({str(tmp_path / 'x')!r}, 'w') for _ in range(20)]"
    close = f"import os\nif not {IN_CHILD}:\n    os.closerange(3, 64); os.write(1, b'noise'); kept = {files}"
    more = "" if ends else "\nelse: os._exit(3)"
    options = {"secret_names": {"HF_TOKEN"}, "environ": behind_ours(tmp_path / "tidy", close + more)}
    proof = prove(launch, expected={**EXPECTED, "HF_TOKEN": 'hf_"right'}, **options)
    assert (proof.ok, proof.parent["HF_TOKEN"]) == (ends, SECRET), proof.message
    assert "right" not in repr(proof)
    assert (tmp_path / "x").read_text() == ""


@pytest.mark.timeout(60)
def test_who_writes_without_end_does_not_keep_us_from_the_clock() -> None:
    with open("/dev/zero", "rb", buffering=0) as endless:
        before._drain(endless.fileno(), heard := bytearray())
    assert 0 < len(heard) <= before.ANSWER_LIMIT + 65536


def test_noise_on_stdout_and_stderr_does_no_harm(launch: Path, tmp_path: Path) -> None:
    noise = "import os\nfor fd in (1, 2):\n    os.write(fd, b'{\"parent\": {}}\\n\\xff\\x00' * 1000)"
    proof = prove(launch, environ=behind_ours(tmp_path / "loud", noise))
    assert proof.ok, proof.message


def test_leaves_no_record_and_no_file(launch: Path, tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    environ = {"PATH": "/usr/bin:/bin", "LAMPLIGHTER_RECORDS": str(records), "PYTHONDONTWRITEBYTECODE": "1"}
    before = sorted(tmp_path.rglob("*"))
    assert prove(launch, environ=environ).ok
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("python", [path for path in PYTHONS if "/3.9" in path] or [sys.executable])
def test_runs_on_the_nodes_oldest_python_in_isolation(launch: Path, python: str) -> None:
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from lamplighter.node.variables.before import prove_before\n"
        "proof = prove_before(sys.argv[2], [sys.argv[3]], json.loads(sys.argv[4]), 30)\n"
        "print(json.dumps([proof.ok, proof.message]))"
    )
    words = [python, "-I", "-S", "-c", code, PROJECT, launch, sys.executable, json.dumps(EXPECTED)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert json.loads(done.stdout)[0] is True


def test_of_a_program_that_is_no_python_the_exports_are_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "launch.sh"
    script.write_text('#!/bin/sh\nexport SAID="a word" LOST=other\nexec "$@"\n')
    script.chmod(0o755)
    told: list[str] = []
    run: Any = SimpleNamespace(progress=told.append)
    staged: Any = SimpleNamespace(release=SimpleNamespace(launch_script=str(script)))
    monkeypatch.setattr(environment, "_how_to_fix", lambda *_: "fix it")

    def expected(**values: str) -> Expected:
        return Expected(values, frozenset(), frozenset(), frozenset(), "d")

    environment._prove_exports(run, staged, expected(SAID="a word"))
    assert told[0].startswith("1 variable proven in what the launch script starts")
    with pytest.raises(StageFailure, match="LOST, UNSAID are not as wanted in what the launch script starts"):
        environment._prove_exports(run, staged, expected(SAID="a word", LOST="hush", UNSAID=""))
    script.write_text("#!/bin/sh\necho no such shell >&2\nexit 3\n")
    with pytest.raises(StageFailure, match="no such shell"):
        environment._prove_exports(run, staged, expected())
