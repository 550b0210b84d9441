"""ssh_config made readable for paramiko: Include in its place, Match conditions that it does not know never true."""

from __future__ import annotations

from pathlib import Path

import paramiko
import pytest

from lamplighter.errors import UsageError
from lamplighter.inventory.schema import ConnectionSpec
from lamplighter.run.ssh import Node
from lamplighter.run.ssh_config import expand


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def lookup(directory: Path, text: str, host: str = "gpu1") -> dict[str, object]:
    (directory / "config").write_text(text)
    return dict(paramiko.SSHConfig.from_text(expand(directory / "config", directory)).lookup(host))


def test_a_missing_file_is_empty(directory: Path) -> None:
    assert expand(directory / "none", directory).strip() == ""


def test_includes_stand_in_their_place(directory: Path) -> None:
    (directory / "d").mkdir()
    (directory / "d" / "1").write_text("Host gpu*\n  User first\n")
    (directory / "d" / "2").write_text("Host gpu*\n  User second\n  Port 2222\n")

    found = lookup(directory, "Include d/* missing\nHost gpu1\n  User late\n  Compression yes\n")

    assert (found["user"], found["port"], found["compression"]) == ("first", "2222", "yes")


def test_what_follows_an_include_belongs_to_its_own_block(directory: Path) -> None:
    (directory / "more").write_text("Host other\n  User other\n")

    found = lookup(directory, "Host gpu1\n  Include more\n  User mine\nHost *\n  Port 7\n")

    assert (found["user"], found["port"]) == ("mine", "7")
    assert "user" not in lookup(directory, "Host gpu1\n  Include more\n  User mine\n", "gpu2")


@pytest.mark.parametrize("line", ["Include ~/more", "include=more", 'INCLUDE "{directory}/more"', "Include nope more"])
def test_spellings_of_include(directory: Path, line: str) -> None:
    (directory / "more").write_text("Port 2222\n")

    assert lookup(directory, line.format(directory=directory) + "\n")["port"] == "2222"


def test_includes_in_a_circle(directory: Path) -> None:
    with pytest.raises(UsageError, match="16 deep"):
        lookup(directory, "Include config\n")


def test_an_include_line_that_cannot_be_read(directory: Path) -> None:
    with pytest.raises(UsageError, match="Include 'more"):
        lookup(directory, "Include 'more\n")


def test_a_file_that_cannot_be_read(directory: Path) -> None:
    (directory / "config").mkdir()

    with pytest.raises(UsageError, match="cannot read the SSH client configuration"):
        expand(directory / "config", directory)


@pytest.mark.parametrize(
    ("condition", "applies"),
    [
        ("host gpu1", True),
        ("Host gpu*,other", True),
        ("originalhost gpu2", False),
        ("!host gpu2 user ada", True),
        ("user bob", False),
        ("all", True),
        ("final all", True),  # Fedora's /etc/ssh/ssh_config.d
        ("canonical all", False),
        ("localnetwork 10.0.0.0/8", False),
        ("host gpu1 tagged fast", False),
        ("version OpenSSH_10*", False),
        ("host", False),
        ('exec "', False),
    ],
)
def test_match_conditions(directory: Path, condition: str, applies: bool) -> None:
    text = f"Host gpu1\n  User ada\nMatch {condition}\n  Port 2222\n"

    assert ("port" in lookup(directory, text)) is applies


# -- the way to a node


def route(directory: Path, text: str, spec: ConnectionSpec) -> list[str]:
    (directory / "config").write_text(text)
    node = Node("gpu1", spec, user_ssh=directory, system_ssh=directory / "etc")
    return [hop.label for hop in node._route()]


def test_proxy_jump_chain_outermost_first(directory: Path) -> None:
    text = """
Host gpu1
  ProxyJump ann@a,b:2200,ssh://c
Host c
  HostName c.lab
  User cara
  ProxyJump never
Host *
  User me
"""
    assert route(directory, text, ConnectionSpec(host="gpu1", port=23)) == [
        "ann@a", "me@b:2200", "cara@c.lab", "me@gpu1:23",
    ]  # fmt: skip


def test_the_first_jump_host_may_have_jumps_of_its_own(directory: Path) -> None:
    text = "Host gpu1\n ProxyJump b\nHost b\n ProxyJump a\nHost *\n User me\n"

    assert route(directory, text, ConnectionSpec(host="gpu1")) == ["me@a", "me@b", "me@gpu1"]


@pytest.mark.parametrize("text", ["ProxyJump none\n", "ProxyJump gpu1\n", "Host x\n ProxyJump a\n"])
def test_no_jump(directory: Path, text: str) -> None:
    assert route(directory, text + "Host *\n User me\n", ConnectionSpec(host="gpu1")) == ["me@gpu1"]


def test_jumps_in_a_circle_end(directory: Path) -> None:
    text = "Host gpu1\n ProxyJump a\nHost a\n ProxyJump gpu1\nHost *\n User me\n"

    assert route(directory, text, ConnectionSpec(host="gpu1")) == ["me@a", "me@gpu1"]


def test_the_inventory_wins_also_in_match_and_tokens(directory: Path) -> None:
    text = "Match user ada\n HostName %h.lab\nHost *\n User bob\n Port 1\n ProxyCommand relay %h %p %r\n"
    (directory / "config").write_text(text)
    node = Node("gpu1", ConnectionSpec(host="gpu1", user="ada", port=22), user_ssh=directory, system_ssh=directory)

    (hop,) = node._route()

    assert hop.label == "ada@gpu1.lab"
    assert hop._connection.ssh_config["proxycommand"] == "relay gpu1.lab 22 ada"
    assert node.user == "ada"


@pytest.mark.parametrize("text", ["Port many\n", "nonsense\n", "Host 'x\n", "ProxyJump a:b\n"])
def test_a_config_that_makes_no_sense_is_a_usage_error(directory: Path, text: str) -> None:
    with pytest.raises(UsageError):
        route(directory, text, ConnectionSpec(host="gpu1"))


@pytest.mark.parametrize("text", ["ConnectTimeout none\n", "ForwardAgent /run/agent\n", "AddressFamily inet\n"])
def test_words_that_fabric_stumbles_over(directory: Path, text: str) -> None:
    assert route(directory, text, ConnectionSpec(host="gpu1", user="me")) == ["me@gpu1"]
