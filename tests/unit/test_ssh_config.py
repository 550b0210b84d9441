"""What `ssh -G` says of a login, who takes it from there, and what is made of it where there is no ssh."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import pwd
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lamplighter.errors import LoginFailed, UsageError
from lamplighter.inventory.schema import ConnectionSpec
from lamplighter.ssh import config
from lamplighter.ssh.config import Known, Reading, Settings, fingerprint, is_encrypted
from lamplighter.ssh.connection import Node
from lamplighter.ssh.fabric import read_ssh_config

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
ME = pwd.getpwuid(os.getuid()).pw_name

KEY = b"\0\0\0\x0bssh-ed25519" + b"k" * 32
OTHER = b"\0\0\0\x0bssh-ed25519" + b"o" * 32
K, X = (base64.b64encode(blob).decode() for blob in (KEY, OTHER))


def route(directory: Path, text: str, spec: ConnectionSpec | None = None) -> list[Settings]:
    file = directory / "config"
    file.write_text(text)
    return reading(replace(spec or ConnectionSpec(host="gpu1"), ssh_config=str(file))).route()


def reading(spec: ConnectionSpec) -> Reading:
    return Reading(spec, read_ssh_config)


def labels(directory: Path, text: str, spec: ConnectionSpec | None = None) -> list[str]:
    return [stop.label for stop in route(directory, text, spec)]


@needs_ssh
def test_the_inventory_wins_also_in_match_and_tokens(tmp_path: Path) -> None:
    text = "Match user ada\n HostName %h.lab\nHost *\n User bob\n Port 1\n ProxyCommand relay %h %p %r\n"

    (stop,) = route(tmp_path, text, ConnectionSpec(host="gpu1", user="ada", port=22))

    assert stop.label == "ada@gpu1.lab"


@needs_ssh
def test_what_the_inventory_says_for_ssh_holds_for_the_node_alone(tmp_path: Path) -> None:
    options = (("proxyjump", "bastion"), ("user", "first"))
    text = "Host gpu1\n  ProxyJump other\n  User late\nHost bastion\n  User ops\n"
    spec = ConnectionSpec("gpu1", key_file="~/k", ssh_options=options)

    stops = route(tmp_path, text, spec)

    assert [stop.label for stop in stops] == ["ops@bastion", "first@gpu1"]
    assert Path.home() / "k" not in stops[0].identities
    assert stops[1].identities[0] == Path.home() / "k"
    assert Node("gpu1", spec).ssh_line == "ssh -i '~/k' -o proxyjump=bastion -o user=first gpu1"


@needs_ssh
def test_proxy_jump_chain_outermost_first(tmp_path: Path) -> None:
    text = """
Host gpu1
  ProxyJump ann@a,b:2200,ssh://c
Host c
  HostName c.lab
  User cara
  ProxyJump never
Host a
  ProxyJump before
Host *
  User me
"""
    assert labels(tmp_path, text, ConnectionSpec(host="gpu1", port=23)) == [
        "me@before", "ann@a", "me@b:2200", "cara@c.lab", "me@gpu1:23",
    ]  # fmt: skip


@needs_ssh
@pytest.mark.parametrize("text", ["Host gpu1\n ProxyJump a\nHost a\n ProxyJump gpu1\n", "Host *\n ProxyJump gpu1\n"])
def test_jumps_in_a_circle_are_a_usage_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"go round in a circle|jumphost loop"):
        route(tmp_path, text)


@needs_ssh
@pytest.mark.parametrize(
    "text",
    ["Port many\n", "nonsense\n", "ProxyJump a:b\n", "ConnectTimeout soon\n", 'UserKnownHostsFile "a\n', "Host 'x\n"],
)
def test_a_config_that_makes_no_sense_is_told_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        route(tmp_path, f"User me\n{text}")

    assert caught.value.origin == f"{tmp_path}/config:2"
    assert "ssh -G HOST" in caught.value.next_step


@needs_ssh
def test_a_mistake_in_an_included_file_is_told_with_that_file(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("# more\n\nPort 99999999999\n")
    with pytest.raises(UsageError) as caught:
        route(tmp_path, f"Include {tmp_path}/more\n")
    assert caught.value.origin == f"{tmp_path}/more:3"


@needs_ssh
def test_a_match_exec_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "READ_SECONDS", 0.3)
    with pytest.raises(UsageError, match=r"did not end within 0\.3 s"):
        route(tmp_path, 'Match exec "exec sleep 600"\n  Port 1\n')


@pytest.mark.parametrize("kind", ["directory", "FIFO", "missing"])
@needs_ssh
def test_a_config_that_is_no_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "config"
    if kind == "directory":
        file.mkdir()
    elif kind == "FIFO":
        os.mkfifo(file)
    with pytest.raises(UsageError):
        reading(ConnectionSpec(host="gpu1", ssh_config=str(file))).route()


def test_a_uid_without_a_name_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    assert config.local_user() == ME
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(UsageError, match="no user exists for uid 54321"):
        config.local_user()
    monkeypatch.setenv("USER", "me")
    assert config.local_user() == "me"


@needs_ssh
@pytest.mark.parametrize(
    ("inventory", "said", "seconds"), [(10, "3", 3), (5, "3", 5), (10, "none", 10), (10, "2147483647", 86400)]
)
def test_connect_timeout(tmp_path: Path, inventory: float, said: str, seconds: float) -> None:
    (tmp_path / "config").write_text(f"ConnectTimeout {said}\n")
    spec = ConnectionSpec(host="gpu1", connect_timeout=inventory, ssh_config=str(tmp_path / "config"))
    assert Node("gpu1", spec)._connect_timeout == seconds


# -- who takes it from there


PLAIN = "UserKnownHostsFile known\nGlobalKnownHostsFile none\nIdentityFile key\nIdentityAgent none\n"


@needs_ssh
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("Match originalhost gpu1\n  ProxyJump a\nMatch all\n", ""),
        ("ConnectTimeout 3\nServerAliveInterval 3\nForwardAgent yes\nCompression yes\n", ""),
        ("HostName elsewhere\n", "a host key that no plain line of known_hosts has"),
        ("ProxyCommand nc %h %p\n", "proxycommand"),
        ("KnownHostsCommand /bin/cat x\n", "knownhostscommand"),
        ("RevokedHostKeys /x\n", "revokedhostkeys"),
        ("PKCS11Provider /x\n", "pkcs11provider"),
        ("CertificateFile /x\n", "certificatefile"),
        ("HostbasedAuthentication yes\n", "hostbasedauthentication"),
        ("VerifyHostKeyDNS ask\n", "verifyhostkeydns"),
        ("NoHostAuthenticationForLocalhost yes\n", "nohostauthenticationforlocalhost"),
        ("PubkeyAuthentication no\n", "pubkeyauthentication"),
        ("IdentityAgent /x\n", "identityagent"),
        ("IdentityFile ~/%n\n", "the tokens in"),
        ("IdentityFile {directory}/certified\n", "the certificate of"),
        ("IdentityFile {directory}/token\n", "the security key of"),
        ("ControlPath {directory}/master\n", "a ControlMaster that is up"),
        ("GSSAPIAuthentication yes\n", "gssapiauthentication with a ticket"),
    ],
)
def test_what_is_beyond_paramiko(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "known").write_text(f"gpu1,a ssh-ed25519 {K}\n")
    (tmp_path / "certified-cert.pub").touch()
    (tmp_path / "token.pub").write_text("sk-ssh-ed25519@openssh.com AAAA me\n")
    monkeypatch.delenv("KRB5CCNAME", raising=False)
    if "ticket" in reason:
        monkeypatch.setenv("KRB5CCNAME", "FILE:/x")
    with socket.socket(socket.AF_UNIX) as master:
        master.bind("master")
        master.listen()
        monkeypatch.setitem(config._SSHS_OWN, "identityagent", "none")
        if reason == "identityagent":
            monkeypatch.setitem(config._SSHS_OWN, "identityagent", "SSH_AUTH_SOCK")
        found = route(tmp_path, text.format(directory=tmp_path) + PLAIN)[-1].beyond_paramiko
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def hashed(name: str) -> str:
    salt = b"salt" * 5
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("text", "port", "blobs"),
    [
        (f"gpu1 ssh-ed25519 {K}", 22, [KEY]),
        (f"gpu1 ssh-ed25519 {K} a comment with blanks", 22, [KEY]),
        (f"  gpu1\tssh-ed25519\t{K}", 22, [KEY]),
        (f"other,gpu1,10.0.0.1 ssh-ed25519 {K}", 22, [KEY]),
        (f"GPU1 ssh-ed25519 {K}", 22, [KEY]),
        (f"gpu12 ssh-ed25519 {K}", 22, []),
        (f"{hashed('gpu1')} ssh-ed25519 {K}", 22, [KEY]),
        (f"{hashed('gpu2')} ssh-ed25519 {K}", 22, []),
        (f"|1|broken ssh-ed25519 {K}", 22, []),
        (f"gpu1 ssh-ed25519 {X}\ngpu1 ssh-ed25519 {K}", 22, [OTHER, KEY]),  # a key that is being rolled over
        ("# nothing\n\ngpu1 ssh-ed25519\n", 22, []),
        (f"[gpu1]:2222 ssh-ed25519 {K}", 2222, [KEY]),
        (f"[gpu1]:2223 ssh-ed25519 {K}", 2222, []),
        (f"gpu1 ssh-ed25519 {K}", 2222, [KEY]),  # ssh accepts the plain host's key on any port
        (f"[gpu1]:2222 ssh-ed25519 {X}\ngpu1 ssh-ed25519 {K}", 2222, [OTHER]),
        (f"{hashed('[gpu1]:2222')} ssh-ed25519 {K}", 2222, [KEY]),
        # ssh alone reads these
        (f"gpu* ssh-ed25519 {K}", 22, None),
        (f"gpu1,!gpu2 ssh-ed25519 {K}", 22, None),
        (f"gpu1 ssh-ed25519 {K}\n@revoked other ssh-ed25519 {X}", 22, None),
        (f"@cert-authority other ssh-ed25519 {K}", 22, None),
    ],
)
def test_keys_that_plain_lines_have(tmp_path: Path, text: str, port: int, blobs: list[bytes] | None) -> None:
    (tmp_path / "known").write_text(text)
    values = {"port": [str(port)], "userknownhostsfile": [f"{tmp_path}/missing {tmp_path} {tmp_path}/known"]}

    found = Settings(ConnectionSpec(host="GPU1"), values).known_keys

    assert (found if found is None else [key.blob for key in found]) == blobs
    assert not found or isinstance(found[0], Known)
    assert not found or found[0].origin.startswith(f"{tmp_path}/known:")


@pytest.mark.parametrize(
    ("said", "files"),
    [
        ("/home/a b/.ssh/k /home/a b/.ssh/k2", ["/home/a b/.ssh/k", "/home/a b/.ssh/k2"]),
        ("/k ~/l", ["/k", "~/l"]),
        ("k l", ["k", "l"]),
        ("", []),
    ],
)  # fmt: skip
def test_files_of_known_hosts_may_have_blanks(said: str, files: list[str]) -> None:
    assert Settings(ConnectionSpec(host="gpu1"), {"userknownhostsfile": [said]}).user_known_hosts == files


def test_an_alias_is_the_only_name_of_a_host() -> None:
    stop = Settings(ConnectionSpec(host="gpu1"), {"port": ["2222"], "hostkeyalias": ["Rack7"]})
    assert stop.host_names == ("rack7",)


def test_fingerprint_is_that_of_ssh_keygen() -> None:
    blob = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl")  # github.com's

    assert fingerprint(blob) == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
@pytest.mark.parametrize("form", ["RFC4716", "PEM"])
@pytest.mark.parametrize("passphrase", ["", "sesame"])
def test_whether_a_key_wants_a_passphrase(tmp_path: Path, form: str, passphrase: str) -> None:
    kind = ["-t", "rsa", "-m", form] if form == "PEM" else ["-t", "ed25519"]
    subprocess.run(["ssh-keygen", "-q", *kind, "-N", passphrase, "-f", str(tmp_path / "key")], check=True)
    assert is_encrypted(tmp_path / "key") is bool(passphrase)
    assert not is_encrypted(tmp_path / "key.pub")
    assert not is_encrypted(tmp_path / "missing")


# -- where there is no ssh


def test_without_ssh_fabrics_reader_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.shutil, "which", lambda name: None)
    text = "Host gpu1\n  HostName gpu1.lab\n  ProxyJump ops@b:7\n  IdentityFile /k\nHost *\n  Port 23\n  User late\n"

    stops = route(tmp_path, text, ConnectionSpec(host="gpu1", user="ada", ssh_options=(("port", "24"),)))

    assert [stop.label for stop in stops] == ["ops@b:7", "ada@gpu1.lab:24"]
    assert Path("/k") in stops[1].identities
    assert stops[1].known_hosts
    with pytest.raises(UsageError, match="transport: openssh needs ssh, which is not installed here"):
        Node("gpu1", ConnectionSpec(host="gpu1", transport="openssh")).open()


def test_a_key_that_is_a_device_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to("/dev/zero")
    with pytest.raises(LoginFailed, match="is a device, and no file"):
        Node("gpu1", ConnectionSpec(host="gpu1", key_file=str(tmp_path / "key"))).open()
