"""ssh_config as OpenSSH reads it; Match conditions that we do not know are never true."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lamplighter.errors import UsageError
from lamplighter.inventory.schema import ConnectionSpec
from lamplighter.ssh.config import Settings, SshConfig, read_lines
from lamplighter.ssh.connection import Node

#: Lines that ssh and we should make the same of, in any order.
PIECES = (
    "Host gpu1\n", "Host other # gpu1\n", "Host gpu* !gpu1\n", "Host g?u1 x\n", "Host=*\n",
    "Match host gpu1\n", 'Match exec "test x = x"\n', "Match user ada host=y\n", "Match !originalhost other\n",
    "Match originalhost GPU1\n", "Match host GPU*\n", "Match final all\n", "Match all\n",
    "  User ada # me\n", ' User "bob"\n', "\tPort=7\n", "Port 8 #\n", "HostName y\n", "HostName Z # %%\n",
    "HostName %h.Lab\n", "ProxyJump a # b\n", "ProxyJump none\n", "ProxyCommand nc a b # c\n", "ProxyCommand none\n",
    "CertificateFile a\n", "CertificateFile 'b c' # d\n", "# Host *\n", "\n",
    "Include {directory}/inner\n", "Include {directory}/none # x\n", "Include {directory}/d/*\n",
)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def settings(directory: Path, text: str, host: str = "gpu1") -> Settings:
    (directory / "config").write_text(text)
    return SshConfig((read_lines(directory / "config", directory),)).lookup(host)


def lookup(directory: Path, text: str, host: str = "gpu1") -> dict[str, str]:
    """The first value of each keyword."""
    return {keyword: values[0] for keyword, values in settings(directory, text, host).values.items()}


def test_a_missing_file_is_empty(directory: Path) -> None:
    assert read_lines(directory / "none", directory) == ()


def test_includes_stand_in_their_place(directory: Path) -> None:
    (directory / "d").mkdir()
    (directory / "d" / "1").write_text("Host gpu*\n  User first\n")
    (directory / "d" / "2").write_text("Host gpu*\n  User second\n  Port 2222\n")

    found = lookup(directory, "Include d/* missing\nHost gpu1\n  User late\n  Compression yes\n")

    assert (found["user"], found["port"], found["compression"]) == ("first", "2222", "yes")


def test_a_directory_among_the_included_files_is_skipped(directory: Path) -> None:
    (directory / "d" / "1-old").mkdir(parents=True)
    (directory / "d" / "2").write_text("Port 2222\n")

    assert lookup(directory, "Include d/*\nInclude d\nUser me\n") == {
        "port": "2222", "user": "me", "hostname": "gpu1",
    }  # fmt: skip


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
    with pytest.raises(UsageError, match=r"config:2: .*not make sense\n  why: a quote is not closed: 'more"):
        lookup(directory, "Port 1\nInclude 'more\n")


def test_a_file_that_cannot_be_read(directory: Path) -> None:
    (directory / "config").mkdir()

    with pytest.raises(UsageError, match="cannot read the SSH client configuration"):
        read_lines(directory / "config", directory)


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
        ('exec "test x = x"', True),
        ("exec 'exit 1' # a comment", False),
        ('!exec "test %h = gpu2"', True),
        ("host=gpu1 user = ada", True),
        ('host "gpu2,gpu1" # all', True),
        ("host gpu*,!gpu1", False),
        ("!all", False),
    ],
)
def test_match_conditions(directory: Path, condition: str, applies: bool) -> None:
    text = f"Host gpu1\n  User ada\nMatch {condition}\n  Port 2222\n"

    assert ("port" in lookup(directory, text)) is applies


def test_a_mistake_is_told_with_its_file_and_line(directory: Path) -> None:
    (directory / "more").write_text('# more\n\nUserKnownHostsFile "a b\n')

    with pytest.raises(UsageError) as caught:
        lookup(directory, "Include more\n")

    assert caught.value.origin == f"{directory}/more:3"


def test_an_include_within_a_block_holds_where_the_block_does(directory: Path) -> None:
    (directory / "more").write_text("Port 1\nHost *\n  User more\nMatch all\n  Include even\n")
    (directory / "even").write_text("Host gpu*\n  Compression yes\n")
    text = "Host other gpu2\n  Include more\n  HostName x\nHost *\n  Port 7\n"

    assert lookup(directory, text) == {"port": "7", "hostname": "gpu1"}
    assert lookup(directory, text, "other") == {"port": "1", "user": "more", "hostname": "x"}
    assert lookup(directory, text, "gpu2") == {"port": "1", "user": "more", "hostname": "x", "compression": "yes"}


def test_blocks_are_read_again_for_the_name_where_a_final_one_asks_for_it(directory: Path) -> None:
    text = "HostName %h.lab\nHost gpu1.lab\n  User late\n"

    assert "user" not in lookup(directory, text)
    assert lookup(directory, text + "Match final host gpu1.lab\n  Port 7\n") == {
        "hostname": "gpu1.lab", "user": "late", "port": "7",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "keyword", "values"),
    [
        ("Port 2222 # odd\n", "port", ["2222"]),
        ("Port=2222\n", "port", ["2222"]),
        ("Port = 2222\nPort 1\n", "port", ["2222"]),
        ("Port 0022\n", "port", ["22"]),
        ("Port ssh\n", "port", ["22"]),
        ("User bob # me\n", "user", ["bob"]),
        ('User "bob"\n', "user", ["bob"]),
        ("User bo#b\n", "user", ["bo#b"]),
        ("IdentityFile a\nIdentityFile 'b c' # d\nIdentityFile a\n", "identityfile", ["a", "b c"]),
        ("CertificateFile a\nCertificateFile b\n", "certificatefile", ["a", "b"]),
        ("IdentityFile ${HOME}/%n-%%\n", "identityfile", ["{home}/gpu1-%"]),
        ("IdentityFile %d/~x\nHostName y\n", "identityfile", ["{home}/~x"]),
        ('IdentityAgent "~/a b"\n', "identityagent", ["{home}/a b"]),
        ("IdentityAgent $SOMEWHERE\n", "identityagent", ["$SOMEWHERE"]),
        ("CertificateFile ~/%r@%h:%p\nUser bob\nHostName y\n", "certificatefile", ["{home}/bob@y:22"]),
        ("UserKnownHostsFile ~/k_%k 'a b' # c\n", "userknownhostsfile", ["{home}/k_gpu1", "a b"]),
        ("HostKeyAlias Rack7\nUserKnownHostsFile k_%k\n", "userknownhostsfile", ["k_rack7"]),
        ("RevokedHostKeys '~/r %h' # c\n", "revokedhostkeys", ["{home}/r gpu1"]),
        ("HostName %h.%%x\n", "hostname", ["gpu1.%x"]),
        ("HostName GPU1.Lab\nProxyCommand nc %h %n\n", "proxycommand", ["nc gpu1.lab gpu1"]),
        ("HostName FE80::A\nProxyCommand nc %h\n", "proxycommand", ["nc FE80::A"]),
        ("ProxyCommand nc %h %n # %%h ${HOME} ~\nHostName y\n", "proxycommand", ["nc y gpu1 # %h ${HOME} ~"]),
        ('ProxyCommand = "a b" c\n', "proxycommand", ['"a b" c']),
        ("ProxyCommand none\nProxyJump a\n", "proxycommand", None),
        ("ProxyJump a # b\n", "proxyjump", ["a"]),
        ("ProxyJump j-%h\n", "proxyjump", ["j-gpu1"]),
        # the first of the two counts
        ("ProxyCommand nc\nProxyJump a\n", "proxyjump", None),
        ("ProxyJump a\nProxyCommand nc\n", "proxycommand", None),
        ("ProxyCommand none\nProxyJump a\n", "proxyjump", None),
        ("ProxyJump none\nProxyCommand nc\n", "proxycommand", ["nc"]),
    ],
)
def test_settings_as_openssh_reads_them(directory: Path, text: str, keyword: str, values: list[str] | None) -> None:
    told = settings(directory, text).all(keyword)

    assert told == (values and tuple(value.replace("{home}", str(directory)) for value in values))


def test_the_name_that_was_asked_for_keeps_its_case_where_ssh_shows_it(directory: Path) -> None:
    text = "UserKnownHostsFile k_%k_%h\nProxyCommand nc %h %n\nMatch final all\nHost gpu1\n  Port 7\n"

    assert lookup(directory, text, "GPU1") == {
        "hostname": "gpu1", "userknownhostsfile": "k_GPU1_gpu1", "proxycommand": "nc gpu1 GPU1", "port": "7",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7), ("1m30s", 90), ("2H", 7200), ("1s1", 2), ("07", 7), ("2147483647", 2**31 - 1), ("none", None)],
)
def test_times(directory: Path, text: str, seconds: float | None) -> None:
    assert settings(directory, f"ConnectTimeout {text}\n").seconds("connecttimeout") == seconds


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
@given(st.lists(st.sampled_from(PIECES), max_size=7), st.sampled_from(["gpu1", "gpu1", "GPU1", "FE80::A"]))
@hypothesis_settings(max_examples=30, deadline=None)
def test_ssh_itself_reads_the_same(pieces: list[str], host: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "inner").write_text("User inner\nHost *\n  Port 5\nHost other\n  Port 6\n")
        (directory / "d" / "sub").mkdir(parents=True)
        (directory / "d" / "two").write_text("Host *\n  User two\n")
        text = "".join(pieces).replace("{directory}", name)
        ours = settings(directory, text, host)
        words = ["ssh", "-G", "-F", str(directory / "config"), host]
        shown = subprocess.run(words, capture_output=True, check=False, text=True)
    assert shown.returncode == 0, shown.stderr
    theirs: dict[str, list[str]] = {}
    for line in shown.stdout.splitlines():
        keyword, _, value = line.partition(" ")
        theirs.setdefault(keyword, []).append(value)
    me = pwd.getpwuid(os.getuid()).pw_name
    for keyword, usual in (("hostname", ""), ("user", me), ("port", "22"), ("proxyjump", "none")):
        assert [ours.get(keyword, usual)] == theirs.get(keyword, ["none"]), text
    assert ours.get("proxycommand", "none") == theirs.get("proxycommand", ["none"])[0], text
    for keyword in ("certificatefile",):
        assert list(ours.all(keyword) or ()) == theirs.get(keyword, []), text


def test_who_runs_this_is_told_by_the_uid(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER"):
        monkeypatch.setenv(variable, "left-by-su")

    me = pwd.getpwuid(os.getuid()).pw_name
    assert lookup(directory, "IdentityFile k_%u_%r\n")["identityfile"] == f"k_{me}_{me}"
    assert route(directory, "", ConnectionSpec(host="gpu1")) == [f"{me}@gpu1"]


def test_a_uid_without_a_name_is_a_usage_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)

    with pytest.raises(UsageError, match="no user exists for uid 54321"):
        Node("gpu1", ConnectionSpec(host="gpu1"))
    monkeypatch.setenv("HOME", str(directory))
    with pytest.raises(UsageError, match="no user exists for uid 54321"):
        route(directory, "", ConnectionSpec(host="gpu1"))
    monkeypatch.setenv("USER", "me")
    assert route(directory, "", ConnectionSpec(host="gpu1")) == ["me@gpu1"]
    monkeypatch.delenv("HOME")
    with pytest.raises(UsageError, match="no user exists for uid 54321"):
        lookup(directory, "IdentityFile %d/key\n")


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


def test_a_jump_to_another_port_or_user_of_the_same_address(directory: Path) -> None:
    text = "Host gpu1\n ProxyJump root@gpu1:2222\nHost gpu2\n ProxyJump root@gpu2\n"

    assert route(directory, text, ConnectionSpec(host="gpu1", user="me")) == ["root@gpu1:2222", "me@gpu1"]
    assert route(directory, text, ConnectionSpec(host="gpu2", user="me", port=2)) == ["root@gpu2", "me@gpu2:2"]
    assert route(directory, text, ConnectionSpec(host="gpu2", user="root")) == ["root@gpu2"]


def test_jumps_in_a_circle_end(directory: Path) -> None:
    text = "Host gpu1\n ProxyJump a\nHost a\n ProxyJump gpu1\nHost *\n User me\n"

    assert route(directory, text, ConnectionSpec(host="gpu1")) == ["me@a", "me@gpu1"]


def test_the_inventory_wins_also_in_match_and_tokens(directory: Path) -> None:
    text = "Match user ada\n HostName %h.lab\nHost *\n User bob\n Port 1\n ProxyCommand relay %h %p %r\n"
    (directory / "config").write_text(text)
    node = Node("gpu1", ConnectionSpec(host="gpu1", user="ada", port=22), user_ssh=directory, system_ssh=directory)

    (hop,) = node._route()

    assert hop.label == "ada@gpu1.lab"
    assert hop._settings.get("proxycommand") == "relay gpu1.lab 22 ada"
    assert node.user == "ada"


@pytest.mark.parametrize(
    "text",
    [
        "Port many\n", "nonsense\n", "Host 'x\n", "ProxyJump a:b\n", "User bob smith\n", 'Match exec "\n',
        'UserKnownHostsFile "a\n', "IdentityFile ${NO_SUCH_VARIABLE}/x\n", "ProxyCommand date +%Y\n",
        "IdentityFile ~nobody-of-this-name/x\n", "ConnectTimeout soon\n",
    ],
)  # fmt: skip
def test_a_config_that_makes_no_sense_is_a_usage_error(directory: Path, text: str) -> None:
    with pytest.raises(UsageError):
        route(directory, text, ConnectionSpec(host="gpu1"))


@pytest.mark.parametrize("keyword", ["Port", "ConnectTimeout", "CanonicalizeMaxDots"])
@pytest.mark.parametrize(
    "value",
    ["abc", "-1", "3.5", "0x10", "''", "99999999999", "2147483648", pytest.param("9" * 5000, id="huge"), "²", "٣"],
)
@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_a_number_that_ssh_refuses_is_a_usage_error_with_its_line(directory: Path, keyword: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        route(directory, f"User me\n{keyword} {value}\n", ConnectionSpec(host="gpu1"))

    assert caught.value.origin == f"{directory}/config:2"
    words = ["ssh", "-G", "-F", str(directory / "config"), "x"]
    assert subprocess.run(words, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize(
    "text", ["ConnectTimeout none\n", "ForwardAgent /run/agent\n", "AddressFamily inet\n", "RevokedHostKeys none\n"]
)
def test_words_that_fabric_stumbles_over(directory: Path, text: str) -> None:
    assert route(directory, text, ConnectionSpec(host="gpu1", user="me")) == ["me@gpu1"]


def test_no_known_hosts_file_at_all(directory: Path) -> None:
    assert route(
        directory, "UserKnownHostsFile none\nGlobalKnownHostsFile none\nUser me\n", ConnectionSpec(host="gpu1")
    ) == ["me@gpu1"]


@pytest.mark.parametrize(
    ("inventory", "config", "seconds"), [(10, "3", 3), (5, "3", 5), (10, "none", 10), (10, "2147483647", 86400)]
)
def test_connect_timeout(directory: Path, inventory: float, config: str, seconds: float) -> None:
    (directory / "config").write_text(f"ConnectTimeout {config}\n")
    spec = ConnectionSpec(host="gpu1", connect_timeout=inventory)
    (hop,) = Node("gpu1", spec, user_ssh=directory, system_ssh=directory)._route()

    assert hop._timeout == seconds


def test_what_the_inventory_says_for_ssh_stands_before_all_files_and_for_the_node_alone(directory: Path) -> None:
    (directory / "config").write_text("Host gpu1\n  ProxyJump other\n  User late\nHost bastion\n  User ops\n")
    options = (("proxyjump", "bastion"), ("user", "first"), ("proxycommand", "none"))
    node = Node("gpu1", ConnectionSpec("gpu1", ssh_options=options), user_ssh=directory, system_ssh=directory)
    assert [hop.label for hop in node._route()] == ["ops@bastion", "first@gpu1"]
    assert node.ssh_line == "ssh -o proxyjump=bastion -o user=first -o proxycommand=none gpu1"
