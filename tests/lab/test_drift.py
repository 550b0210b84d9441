"""Drift of a live server, told by name with both values; and what `deploy --if-changed` makes of it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from invoke.config import Config
from invoke.context import Context
from invoke.exceptions import Exit as Leave

from lab import control, ledger
from lamplighter import tasks
from lamplighter.inventory import load_inventory
from lamplighter.node.events import Exit
from lamplighter.run.host_session import HostSession, open_session
from lamplighter.ssh.fabric import FabricWay
from tests.driver import PROJECT, ask, eventually, signals_as_before
from tests.lab.conftest import Box

#: `./inv dev.soak` takes the time for all of them.
DEPLOYS = 20 if os.environ.get("LAMPLIGHTER_SOAK") else 4


def standing_of(opened: HostSession, box: Box) -> dict[str, Any]:
    servers = load_inventory(box.driver.inventory, PROJECT / "roles").host("box").servers
    return opened.standings(list(servers.values()))["demo"]


def drift_of(opened: HostSession, box: Box) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    found = standing_of(opened, box)["drift"]
    assert found["unknown"] == []
    return {(each["kind"], each["name"]): (each["wanted"], each["found"]) for each in found["differences"]}


def opened(box: Box) -> Any:
    return open_session(load_inventory(box.driver.inventory, PROJECT / "roles").host("box"), PROJECT)


def deploy(session: HostSession, box: Box) -> None:
    """Deploy what the inventory says now, over an open connection."""
    heard: list[dict[str, Any]] = []
    servers = load_inventory(box.driver.inventory, session.project / "roles").host("box").servers
    session.run("deploy", servers["demo"], heard.append)
    assert heard[-1]["outcome"] == "deployed", json.dumps(heard[-3:])


def test_a_node_just_deployed_has_no_drift_and_every_change_is_told_with_both_values(box: Box) -> None:
    box.configure(env={"NCCL_PROTO": "LL"})
    assert box.deploy().code == Exit.OK
    with opened(box) as session:
        assert drift_of(session, box) == {}
        for _ in range(DEPLOYS - 1):
            deploy(session, box)
            for _ in range(3):
                assert drift_of(session, box) == {}
        # the inventory is edited
        box.configure(env={"NCCL_PROTO": "Simple", "NEW": "1"}, args={"context-length": 4096})
        assert drift_of(session, box) == {
            ("inventory", "args --context-length"): ("4096", None),
            ("inventory", "env.NCCL_PROTO"): ("Simple", "LL"),
            ("inventory", "env.NEW"): ("1", None),
        }
        box.configure(env={"NCCL_PROTO": "LL"}, timeouts={"ready": 99})  # how it is treated is no drift
        assert drift_of(session, box) == {}

        # the launch script is edited, and the file of variables
        script = box.state / "current" / "launch.sh"
        text = script.read_text()
        script.write_text(text + "# a hand was here\n")
        (found,) = drift_of(session, box).items()
        assert found[0] == ("release", "launch.sh")
        assert None not in found[1]
        assert found[1][0] != found[1][1]
        script.write_text(text)
        script.chmod(0o700)
        assert drift_of(session, box) == {("release", "launch.sh mode"): ("0755", "0700")}
        script.chmod(0o755)
        (box.state / "current" / "env").chmod(0o644)
        assert drift_of(session, box) == {("release", "env mode"): ("0600", "0644")}
        (box.state / "current" / "env").chmod(0o600)
        sitecustomize = box.state / "current" / "pysite" / "sitecustomize.py"
        kept = sitecustomize.read_text()
        sitecustomize.unlink()
        assert drift_of(session, box)["release", "pysite/sitecustomize.py"][1] is None
        sitecustomize.write_text(kept)
        sitecustomize.chmod(0o644)
        beside = sitecustomize.with_name("usercustomize.py")
        beside.write_text("import os\n")
        [(what, (wanted, now))] = drift_of(session, box).items()
        assert (what, wanted) == (("release", "pysite/usercustomize.py"), None)
        assert now is not None
        beside.unlink()

        # files of the release are gone, or it is not the one that the next start takes
        release = (box.state / "current").resolve()
        for name, told in (("env", "env mode"), ("release.json", "release.json")):
            gone = (release / name).rename(box.directory / name)
            assert drift_of(session, box)["release", told][1] is None
            gone.rename(release / name)
        (box.state / "current").unlink()
        assert drift_of(session, box) == {("release", "current"): (release.name, None)}
        shutil.copytree(release, release.with_name("0" * 12))
        (box.state / "current").symlink_to(f"releases/{'0' * 12}")
        assert drift_of(session, box) == {("release", "current"): (release.name, "0" * 12)}
        (box.state / "current").unlink()
        (box.state / "current").symlink_to(f"releases/{release.name}")
        assert drift_of(session, box) == {}

        # another driver than the one recorded at the deploy
        board = str(box.directory / "box" / "gpu" / "board.json")
        recorded = ledger.read_json(board)
        ledger.write_json(board, {**recorded, "driver": "590.44.01"})
        assert drift_of(session, box) == {("driver", "driver (nvidia-smi)"): (recorded["driver"], "590.44.01")}
        ledger.write_json(board, recorded)
        assert drift_of(session, box) == {}

    status = box.run("status")
    assert status.code == Exit.OK
    assert "drift" not in status.stdout


def test_a_variable_that_the_server_overwrites_is_drift_and_no_reason_to_deploy_again(box: Box) -> None:
    box.configure(env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})  # the server sets it to 8, as SGLang does
    assert box.deploy().code == Exit.DEGRADED
    with opened(box) as session:
        assert drift_of(session, box) == {("environment", "CUDA_DEVICE_MAX_CONNECTIONS"): ("1", "8")}
        found = standing_of(session, box)["drift"]["differences"]
    assert any("sglang::scheduler_TP0, pid " in each["by"] for each in found)
    text = box.run("status").stdout
    assert "drift, environment: CUDA_DEVICE_MAX_CONNECTIONS: wanted 1, found 8 (sglang::" in text
    again = box.deploy("--if-changed")
    assert again.code == Exit.DEGRADED, again
    assert again.server("box", "demo")["outcome"] == "unchanged"


def test_a_server_that_was_started_by_hand_with_other_arguments_is_drift(box: Box) -> None:
    done = box.deploy()
    assert done.code == Exit.OK
    pid = done.server("box", "demo")["serving"]["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: ask(box.port, "/v1/models")[0] == 0)
    eventually(lambda: control.held(box.directory / "box") == [])
    plan = json.loads((box.state / "current" / "plan.json").read_text())["server"]
    words = [str(box.state / "current" / "launch.sh"), *plan["argv"], "--context-length", "4096"]
    path = f"{box.directory / 'box' / 'bin'}:{os.environ['PATH']}"
    by_hand = subprocess.Popen(
        words, env={"HOME": str(box.home), "PATH": path}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        eventually(box.serves)
        with opened(box) as session:
            assert drift_of(session, box) == {
                ("process", f"process on port {box.port}"): (f"pid {pid}", f"pid {by_hand.pid} ({sys.executable})"),
                ("argv", "argv --context-length"): (None, "4096"),
            }
    finally:
        os.killpg(by_hand.pid, signal.SIGKILL)
        by_hand.wait()


#: A build backend of nothing but files, so that pip installs with no network and no setuptools: wheel and editable.
BACKEND = """
import base64, hashlib, os, zipfile
def build(directory, files):
    version = open("version").read().strip()
    info = f"demo_engine-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\\nName: demo-engine\\nVersion: {version}\\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in files.items()}
    words = {path: base64.urlsafe_b64encode(digest).decode().rstrip("=") for path, digest in digests.items()}
    rows = [f"{path},sha256={word},{len(files[path])}" for path, word in words.items()]
    files[f"{info}/RECORD"] = "\\n".join([*rows, f"{info}/RECORD,,", ""])
    name = f"demo_engine-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
def build_wheel(directory, config_settings=None, metadata_directory=None):
    names = [f"demo_engine/{name}" for name in os.listdir("demo_engine") if name.endswith(".py")]
    return build(directory, {name: open(name).read() for name in names})
def build_editable(directory, config_settings=None, metadata_directory=None):
    return build(directory, {"demo_engine.pth": os.getcwd()})
"""


class Venv:
    """An engine's environment: a virtual environment of its own, into which pip installs what ``source`` holds."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.source = directory / "venv", directory / "source"
        self.python = self.directory / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.directory], check=True)
        (self.source / "demo_engine").mkdir(parents=True)
        (self.source / "backend.py").write_text(BACKEND)
        (self.source / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )

    def install(self, version: str, *words: str) -> None:
        (self.source / "version").write_text(version)
        for name in ("__init__", "server", "worker"):
            (self.source / "demo_engine" / f"{name}.py").write_text(f"NAME = {name + version!r}\n")
        offline = ["--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check", "--quiet"]
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", *offline]
        subprocess.run([*map(str, pip), *words, str(self.source)], check=True, capture_output=True)

    @property
    def package(self) -> Path:
        return next(self.directory.glob("lib/python*/site-packages/demo_engine"))


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
def test_an_engine_that_was_patched_or_upgraded_is_drift(box: Box, tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("roles", "templates"):
        shutil.copytree(PROJECT / name, project / name)
    role = project / "roles" / "demo" / "engine.yml"
    role.write_text(role.read_text().replace("distribution: null", "distribution: demo-engine"))
    venv = Venv(tmp_path)
    venv.install("1.0")
    program = "lamplighter-demo-server"
    (venv.python.parent / program).symlink_to(box.directory / "box" / "bin" / program)
    box.configure(python=str(venv.python))
    with open_session(load_inventory(box.driver.inventory, project / "roles").host("box"), project) as session:
        deploy(session, box)
        assert drift_of(session, box) == {}

        subprocess.run([venv.python, "-c", "import demo_engine.server"], check=True)
        assert list(venv.package.glob("__pycache__/server*.pyc"))
        server = venv.package / "server.py"
        kept = server.read_text()
        server.write_text(kept.replace("1.0", "9.9"))  # the same size, and the time that it had
        os.utime(server, ns=(1, 1))
        (venv.package / "worker.py").unlink()
        found = drift_of(session, box)
        assert set(found) == {("engine", "demo_engine/server.py"), ("engine", "demo_engine/worker.py")}
        assert found["engine", "demo_engine/worker.py"] == ("(as in RECORD)", None)
        wanted, now = found["engine", "demo_engine/server.py"]
        assert (wanted, len(now or "")) == ("(as in RECORD)", 12)
        facts = session.facts(session.host.servers["demo"])["engine"]
        assert (list(facts["changed"]), facts["missing"]) == (["demo_engine/server.py"], ["demo_engine/worker.py"])
        server.write_text(kept)
        (venv.package / "worker.py").write_text(kept.replace("server", "worker"))
        assert drift_of(session, box) == {}

        venv.install("2.0")
        assert drift_of(session, box) == {("engine", "demo-engine version"): ("1.0", "2.0")}
        venv.install("1.0", "--editable")
        [(what, (wanted, now))] = drift_of(session, box).items()
        assert (what, wanted) == (("engine", "demo-engine installation"), "(files as in RECORD)")
        assert "is an editable install" in (now or "")


def test_deploy_if_changed(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.configure(env={"NCCL_PROTO": "LL"})
    first = box.deploy("--if-changed")
    assert first.code == Exit.OK, first
    assert first.server("box", "demo")["outcome"] == "deployed"
    pid = first.server("box", "demo")["serving"]["pid"]
    runs = sorted(os.listdir(box.state / "runs"))

    again = box.deploy("--if-changed")
    assert again.code == Exit.OK, again
    report = again.server("box", "demo")
    assert report["outcome"] == "unchanged"
    assert report["serving"]["pid"] == pid
    assert sorted(os.listdir(box.state / "runs")) == runs  # no worker, no journal

    # one login and one exec are all that it costs
    done: list[str] = []
    for name in ("open", "execute"):
        real = getattr(FabricWay, name)
        monkeypatch.setattr(FabricWay, name, lambda *given, name=name, real=real: done.append(name) or real(*given))
    context = Context(Config({**tasks.collection().configuration(), "run": {"dry": False}}))
    monkeypatch.setenv("LAMPLIGHTER_INVENTORY", str(box.driver.inventory))
    with signals_as_before(), pytest.raises(Leave) as left:
        tasks.serving.deploy.body(context, host=["box"], if_changed=True)
    assert left.value.code == Exit.OK
    assert done == ["open", "execute"]
    monkeypatch.undo()

    young = box.deploy("--max-age", "7d")
    assert young.server("box", "demo")["outcome"] == "unchanged", young

    old = box.deploy("--max-age", "1s")
    assert old.server("box", "demo")["outcome"] == "deployed", old
    assert old.server("box", "demo")["serving"]["pid"] != pid
    assert "it has run for" in old.stdout

    box.configure(env={"NCCL_PROTO": "Simple"})
    edited = box.deploy("--if-changed")
    assert edited.server("box", "demo")["outcome"] == "deployed", edited
    assert any("inventory: env.NCCL_PROTO: 'Simple' -> 'LL'" in event.get("message", "") for event in edited.events)

    # a server that does not answer is not left alone
    serving = edited.server("box", "demo")["serving"]["pid"]
    os.kill(serving, signal.SIGKILL)
    eventually(lambda: ask(box.port, "/v1/models")[0] == 0)
    healed = box.deploy("--if-changed")
    assert healed.server("box", "demo")["outcome"] == "deployed", healed
    assert box.serves()

    # secrets that others may read, and nothing for the next start
    (box.state / "current" / "env").chmod(0o644)
    (box.state / "current").unlink()
    fixed = box.deploy("--if-changed")
    assert fixed.server("box", "demo")["outcome"] == "deployed", fixed
    assert (box.state / "current" / "env").stat().st_mode & 0o7777 == 0o600

    assert box.deploy("--max-age", "soon").code == Exit.USAGE


def test_a_bad_release_is_not_tried_again(box: Box) -> None:
    assert box.deploy().code == Exit.OK
    good = json.loads((box.state / "server.json").read_text())["release"]
    box.configure(args={"lab-fail": "die:graphs"})
    failed = box.deploy("--if-changed")
    assert failed.code == Exit.ROLLED_BACK, failed
    bad = failed.server("box", "demo")["release"]
    pid = failed.server("box", "demo")["serving"]["pid"]

    refused = box.deploy("--if-changed")
    assert refused.code == Exit.ROLLED_BACK, refused
    report = refused.server("box", "demo")
    assert report["outcome"] == "refused"
    assert report["cause"] == "bad_release"
    assert report["release"] == bad
    assert report["serving"]["release"] == good
    assert report["serving"]["pid"] == pid  # left alone
    assert bad in report["message"]
    assert report["evidence"]

    box.run("stop")
    assert box.deploy("--if-changed").code == Exit.NOT_READY  # nothing serves: somebody has to look


def test_status_is_watched_over_one_connection(box: Box) -> None:
    assert box.deploy().code == Exit.OK
    with box.driver.started("status", "--host", "box", "--json", "--watch", "0.2") as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())["status"]["hosts"]["box"]["servers"]["demo"]
        assert first["drift"] == {"differences": [], "unknown": []}
        box.configure(port=box.port, env={"A": "1"})
        json.loads(watching.stdout.readline())
        (box.state / "current" / "launch.sh").chmod(0o700)

        def sees_it() -> bool:
            found = json.loads(watching.stdout.readline())["status"]["hosts"]["box"]["servers"]["demo"]  # type: ignore[union-attr]
            return any(each["name"] == "launch.sh mode" for each in found["drift"]["differences"])

        eventually(sees_it)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(120) == Exit.OK
