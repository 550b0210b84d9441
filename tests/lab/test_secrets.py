"""A secret is found nowhere but where it belongs, whatever the run came to, and a secret argument does its work."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamplighter.node.events import Exit
from tests.driver import Done, ask
from tests.lab.conftest import Box

CASES = Path(__file__).resolve().parent.parent / "cases" / "vault"
MARK = "CANARY"


def write_secrets(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of every origin, on this machine and in the inventory, for the server of the box."""
    monkeypatch.setenv("CONTROL_TOKEN", "env-CANARY-4711")
    inventory = box.driver.inventory
    (inventory.parent / "outside").mkdir()
    (inventory.parent / "outside" / "token").write_text("file-CANARY-4712\n")
    (inventory.parent / "outside" / "password").write_text("pw1\n")
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(inventory.parent / "outside" / "password"))
    sealed = "".join(f"  {line}\n" for line in (CASES / "value.vault").read_text().splitlines())
    (inventory / "host_vars").mkdir(exist_ok=True)
    (inventory / "host_vars" / "box.yml").write_text(
        f"key: !vault |\n{sealed}"
        f"token: \"{{{{ lookup('file', '{inventory.parent}/outside/token') }}}}\"\n"
        "servers:\n  demo:\n"
        "    env: {A_TOKEN: \"{{ lookup('env', 'CONTROL_TOKEN') }}\", B_TOKEN: {value: 'b {{ token }}'}}\n"
        "    secrets: {C_TOKEN: '{{ key }}', D_TOKEN: !secret env:CONTROL_TOKEN}\n"
        "    args: {api-key: '{{ key }}', speculative-num-draft-tokens: 3}\n"
    )


@contextlib.contextmanager
def watched_command_lines() -> Iterator[set[str]]:
    """Every command line of this machine that held a secret while the block ran, but for the server's own."""
    found: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):  # what is watched needs the processor, too
            for number in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):  # it has ended
                    words = Path(f"/proc/{number}/cmdline").read_bytes().decode("utf-8", "replace").replace("\0", " ")
                    if MARK in words and "launch_server.py" not in words and "lamplighter-demo-server" not in words:
                        found.add(words)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def leaks(box: Box) -> list[str]:
    """Files of the control side and of the node that hold a secret, but for the private `env` of a release."""
    found = []
    for path in box.driver.inventory.parent.rglob("*"):
        if path.is_symlink() or not path.is_file() or "outside" in path.parts:
            continue
        is_private = path.name == "env" and stat.S_IMODE(path.stat().st_mode) == 0o600
        if MARK.encode() in path.read_bytes() and not is_private:
            found.append(str(path))
    return found


@pytest.mark.timeout(900)  # sixteen commands, on machines that do other work, too
def test_no_secret_is_told_or_kept_whatever_a_run_comes_to(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    write_secrets(box, monkeypatch)
    monkeypatch.setenv("LAMPLIGHTER_DEBUG", "1")
    done: dict[str, Done] = {}
    with watched_command_lines() as command_lines:
        done["plan before"] = box.run("plan")
        done["deploy"] = box.deploy()
        done["plan after"] = box.run("plan", "--json")
        for verb in ("config", "status", "check", "env", "logs", "attach"):
            done[verb] = box.run(verb)
        monkeypatch.setenv("CONTROL_TOKEN", "env-CANARY-4713")
        done["plan of another token"] = box.run("plan", "--json")
        box.configure(args={"lab-fail": "die:graphs"})
        done["crash"] = box.deploy()
        done["diagnose after a crash"] = box.run("diagnose")
        done["refused"] = box.run("check", "--diff")
        done["stop"] = box.run("stop")
    assert done["deploy"].code == Exit.OK, done["deploy"]
    assert ask(box.port, "/v1/models")[0] == 0
    assert [done[each].code for each in ("plan before", "plan after", "crash")] == [12, 0, Exit.ROLLED_BACK], done
    assert "(another value)" in done["plan of another token"].stdout
    assert "--speculative-num-draft-tokens 3" in done["plan before"].stdout
    assert {name for name, each in done.items() if MARK in each.stdout + each.stderr} == set()
    assert command_lines == set()
    assert leaks(box) == []


def test_a_secret_argument_reaches_the_server_and_is_said_once(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    write_secrets(box, monkeypatch)
    first = box.deploy()
    assert first.code == Exit.OK, first
    assert ask(box.port, "/v1/models")[0] == 401
    process = Path(f"/proc/{first.server('box', 'demo')['serving']['pid']}")
    assert b"sk-CANARY-vaulted" in process.joinpath("cmdline").read_bytes().split(b"\0")
    environment = process.joinpath("environ").read_bytes()
    assert b"LAMPLIGHTER_ARGS_API_KEY" not in environment
    assert b"B_TOKEN=b file-CANARY-4712" in environment
    status = json.loads(box.run("status", "--json").stdout)["status"]["hosts"]["box"]["servers"]["demo"]
    assert status["drift"]["differences"] == []
    told = [each for run in (first, box.deploy()) for each in run.events if "`ps`" in each.get("message", "")]
    assert len(told) == 1
    assert "--api-key" in told[0]["message"]


def test_without_its_variable_a_token_refuses_the_deploy(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    box.configure(env={"HF_TOKEN": "{{ lookup('env','HF_TOKEN') }}"})
    done = box.deploy()
    assert done.code == Exit.USAGE, done
    assert "the environment variable HF_TOKEN is not set" in done.stdout
    assert done.report["hosts"] == {}  # nobody was asked anything
    assert box.run("status").code == Exit.OK  # what needs no token works without it
