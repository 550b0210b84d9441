"""known_hosts as OpenSSH reads it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamplighter.ssh.known_hosts import KnownHosts, KnownKey, fingerprint, host_names, parse_known_hosts, remember

KEY = b"\0\0\0\x0bssh-ed25519" + b"k" * 32
OTHER = b"\0\0\0\x0bssh-ed25519" + b"o" * 32
K, X = (base64.b64encode(blob).decode() for blob in (KEY, OTHER))


def known(text: str) -> KnownHosts:
    return KnownHosts(tuple(parse_known_hosts(text, Path("kh"))))


def judge(text: str, host: str = "gpu1", port: int = 22, kind: str = "ssh-ed25519", blob: bytes = KEY) -> str:
    return known(text).judge(host_names(host, port), kind, blob).word


def hashed(name: str) -> str:
    salt = b"salt" * 5
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (f"gpu1 ssh-ed25519 {K}", "known"),
        (f"gpu1 ssh-ed25519 {K} a comment with blanks", "known"),
        (f"  gpu1\tssh-ed25519\t{K}", "known"),
        (f"other,gpu1,10.0.0.1 ssh-ed25519 {K}", "known"),
        (f"GPU1 ssh-ed25519 {K}", "known"),
        (f"gpu* ssh-ed25519 {K}", "known"),
        (f"gpu? ssh-ed25519 {K}", "known"),
        (f"gpu*,!gpu1 ssh-ed25519 {K}", "unknown"),
        (f"gpu12 ssh-ed25519 {K}", "unknown"),
        (f"{hashed('gpu1')} ssh-ed25519 {K}", "known"),
        (f"{hashed('gpu2')} ssh-ed25519 {K}", "unknown"),
        ("|1|broken ssh-ed25519 " + K, "unknown"),
        (f"gpu1 ssh-ed25519 {X}", "changed"),
        (f"gpu1 ssh-ed25519 {X}\ngpu1 ssh-ed25519 {K}", "known"),  # a key that is being rolled over
        (f"gpu1 ssh-rsa {X}", "changed"),  # its known key was not shown
        (f"@cert-authority gpu1 ssh-ed25519 {K}", "unknown"),
        (f"gpu1 ssh-ed25519 {K}\n@revoked * ssh-ed25519 {K}", "revoked"),
        (f"gpu1 ssh-ed25519 {K}\n@revoked gpu2 ssh-ed25519 {K}", "known"),
        (f"@unheard-of gpu1 ssh-ed25519 {K}", "unknown"),
        ("# nothing\n\ngpu1 ssh-ed25519\ngpu1 ssh-ed25519 !!!", "unknown"),
        ("", "unknown"),
    ],
)
def test_judgement(line: str, word: str) -> None:
    assert judge(line) == word


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (f"[gpu1]:2222 ssh-ed25519 {K}", "known"),
        (f"[gpu1]:2223 ssh-ed25519 {K}", "unknown"),
        (f"gpu1 ssh-ed25519 {K}", "known"),  # OpenSSH accepts the plain host's key on any port
        (f"gpu1 ssh-ed25519 {X}", "unknown"),  # and a different one there may be another server's
        (f"[gpu1]:2222 ssh-ed25519 {X}\ngpu1 ssh-ed25519 {K}", "known"),
        (f"{hashed('[gpu1]:2222')} ssh-ed25519 {K}", "known"),
        (f"[gpu*]:2222 ssh-ed25519 {K}", "known"),
    ],
)
def test_judgement_on_another_port(line: str, word: str) -> None:
    assert judge(line, port=2222) == word


def test_names_under_which_a_host_is_looked_up() -> None:
    assert host_names("GPU1", 22) == ("gpu1",)
    assert host_names("gpu1", 2222) == ("[gpu1]:2222", "gpu1")
    assert host_names("gpu1", 2222, "Rack7") == ("rack7",)


def test_the_old_line_is_named() -> None:
    verdict = known(f"# one\n\ngpu1 ssh-ed25519 {X}\n").judge(("gpu1",), "ssh-ed25519", KEY)

    assert [str(line) for line in verdict.lines] == ["kh:3"]
    assert verdict.lines[0].fingerprint == fingerprint(OTHER)


def test_known_kinds_in_the_order_of_the_files() -> None:
    text = f"@cert-authority gpu1 ecdsa-sha2-nistp256 {K}\ngpu1 ssh-rsa {K}\ngpu1 ssh-ed25519 {K}\ngpu1 ssh-rsa {X}\n"

    assert known(text).kinds(("gpu1",)) == ["ssh-rsa", "ssh-ed25519"]


def test_authorities_are_found() -> None:
    assert [str(line) for line in known(f"\n@cert-authority *.lab ssh-ed25519 {K}").authorities(("a.lab",))] == ["kh:2"]


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "good").write_text(f"gpu1 ssh-ed25519 {K}\n")
    (tmp_path / "junk").write_bytes(b"\xff\xfe gpu1\0\n")

    found = KnownHosts.read([tmp_path / "missing", tmp_path, tmp_path / "junk", tmp_path / "good"])

    assert [line.file.name for line in found.lines] == ["good"]
    assert found.problems == (f"{tmp_path}: Is a directory",)


@settings(database=None)
@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert all(isinstance(key, KnownKey) for key in parse_known_hosts(text, Path("kh")))
    assert judge(text) in ("known", "unknown", "changed", "revoked")


def test_remember_appends_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "new" / "known_hosts"
    remember(file, "[gpu1]:2222", "ssh-ed25519", KEY)
    assert file.read_text() == f"[gpu1]:2222 ssh-ed25519 {K}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700

    file.write_text("gpu2 ssh-rsa AAAA")  # written by hand, without a newline
    remember(file, "gpu1", "ssh-ed25519", KEY)
    assert file.read_text() == f"gpu2 ssh-rsa AAAA\ngpu1 ssh-ed25519 {K}\n"


def test_a_fleet_is_remembered_without_torn_lines(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    names = [f"gpu{number}" for number in range(20)]
    threads = [threading.Thread(target=remember, args=(file, name, "ssh-ed25519", KEY)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(file.read_text().splitlines()) == sorted(f"{name} ssh-ed25519 {K}" for name in names)


def test_fingerprint_is_that_of_ssh_keygen() -> None:
    blob = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl")  # github.com's

    assert fingerprint(blob) == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"
