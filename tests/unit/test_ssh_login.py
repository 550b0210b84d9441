"""Which keys a login tries: named files, what an ssh-agent holds, and where that agent is."""

from __future__ import annotations

import base64
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import paramiko
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paramiko.ssh_exception import SSHException

from lamplighter.ssh import login
from lamplighter.ssh.config import Settings
from lamplighter.ssh.login import Login

CONNECTION = SimpleNamespace(user="ops", host="gpu1", port=22)


def login_with(directory: Path, key_file: str | None = None, **settings: str) -> Login:
    values = {keyword: (value,) for keyword, value in settings.items()}
    return Login("gpu1", CONNECTION, Settings(values, {}), key_file, directory)


def told(one: Login, *held: bytes) -> list[str]:
    """What is tried of an agent that holds these keys."""
    keys = [SimpleNamespace(asbytes=lambda blob=blob: blob, comment="held", get_name=lambda: "") for blob in held]
    agent: Any = SimpleNamespace(get_keys=lambda: keys)
    return [word for _, word in one._keys(agent)]


def key_pair(file: Path) -> bytes:
    """A private key in ``file``, the public one beside it; returns the public blob."""
    key = Ed25519PrivateKey.generate()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    file.write_bytes(key.private_bytes(*form))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    Path(f"{file}.pub").write_bytes(public + b" me\n")
    return base64.b64decode(public.split()[1])


@pytest.fixture
def silent_agent() -> Iterator[str]:
    """An agent that is connected to and never says a word."""
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as server:  # 107 bytes hold a name
        address = f"{short}/agent"
        server.bind(address)
        server.listen()
        yield address


def test_a_public_key_file_names_the_private_one_of_the_agent(tmp_path: Path) -> None:
    mine, other = key_pair(tmp_path / "mine"), key_pair(tmp_path / "other")
    (tmp_path / "mine").unlink()
    wish = {"identityfile": f"{tmp_path}/mine.pub", "identitiesonly": "yes"}

    assert told(login_with(tmp_path, **wish), other, mine) == [f"{tmp_path}/mine.pub by the agent"]

    without = login_with(tmp_path, **wish)
    assert told(without, other) == []
    assert without._unusable == [f"{tmp_path}/mine.pub is a public key and no ssh-agent holds the private one"]


def test_the_default_keys_are_tried_where_ssh_config_names_none(tmp_path: Path) -> None:
    key_pair(tmp_path / "id_ed25519")

    assert len(told(login_with(tmp_path))) == 1
    assert told(login_with(tmp_path, identityfile="none")) == []


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("", "/usual"),
        ("SSH_AUTH_SOCK", "/usual"),
        ("none", ""),
        ("$MY_AGENT", "/mine"),
        ("$NO_SUCH_AGENT", ""),
        ("/run/agent.sock", "/run/agent.sock"),
    ],
)
def test_where_the_agent_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, address: str) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/usual")
    monkeypatch.setenv("MY_AGENT", "/mine")

    assert login_with(tmp_path, **({"identityagent": said} if said else {}))._agent_address == address


def test_an_agent_that_is_not_there_is_named(tmp_path: Path) -> None:
    one = login_with(tmp_path, identityagent=f"{tmp_path}/gone")

    assert one._open_agent() is None
    assert one._unusable == [f"ssh-agent at {tmp_path}/gone: No such file or directory"]


def test_an_agent_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_agent: str
) -> None:
    monkeypatch.setattr(login, "AGENT_TIMEOUT", 0.2)
    one = login_with(tmp_path, identityagent=silent_agent)
    started = time.monotonic()

    assert one._open_agent() is None
    assert time.monotonic() - started < 30
    assert one._unusable == [f"ssh-agent at {silent_agent}: the ssh-agent did not answer within 0.2 s"]


def test_an_agent_that_falls_silent_over_a_signature_is_given_up(
    monkeypatch: pytest.MonkeyPatch, silent_agent: str
) -> None:
    monkeypatch.setattr(login, "AGENT_TIMEOUT", 0.2)
    monkeypatch.setattr(login._Agent, "_connect", lambda agent, wire: setattr(agent, "_conn", wire))
    agent = login._Agent(silent_agent)

    with pytest.raises(SSHException, match=r"did not answer within 0\.2 s"):
        agent._send_message(b"sign this")
    agent.close()


def test_an_agent_full_of_keys(tmp_path: Path) -> None:
    transport = paramiko.Transport.__new__(login.Transport)
    cast("login.Transport", transport).words = ["Disconnect (code 2): Too many authentication failures"]  # type: ignore[assignment]
    one = login_with(tmp_path)
    one._tried = ["agent key a", "agent key b"]

    advice = one._failed(transport, ()).next_step

    assert "IdentityFile and IdentitiesOnly yes" in advice
    assert "MaxAuthTries" in advice
