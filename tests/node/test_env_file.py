"""A release's file of variables: one reader, byte for byte; and secrets of an adopted command line in no other file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node import arguments
from lamplighter.node.health import differences
from lamplighter.node.keeper import adopt
from lamplighter.node.layout import ReleaseDirectory, ServerHome, environment_text
from lamplighter.node.plan import Plan
from lamplighter.node.start.probe import find_api_key
from lamplighter.node.system import files
from lamplighter.node.variables import live
from tests.node.living import Living, process_of, until
from tests.node.test_liveness import ENGINES, plan_of

ODD = {
    "LATIN": b"caf\xe9".decode("utf-8", "surrogateescape"),
    "RETURNS": "one\r\ntwo\rthree",
    "QUOTES": 'it\'s "a" $value `x` \\ #',
    "EMPTY": "",
    "API_KEY": "sk-of-the-hand",
}


def release_with(directory: Path, text: str) -> ReleaseDirectory:
    release = ReleaseDirectory(str(directory))
    files.write_file(release.env, text)
    return release


def test_what_is_read_is_what_the_servers_shell_reads(tmp_path: Path) -> None:
    release = release_with(tmp_path, environment_text(ODD))
    shell = ["/bin/sh", "-c", '. "$1" && exec env -0', "sh", release.env]
    said = subprocess.run(shell, capture_output=True, check=True, env={"PATH": os.environ["PATH"]}).stdout
    told = dict(pair.split(b"=", 1) for pair in said.split(b"\0") if pair)
    assert {name: told[name.encode()].decode("utf-8", "surrogateescape") for name in ODD} == ODD
    assert release.read_environment() == ODD
    assert files.read_text(release.env) == environment_text(ODD)  # what is compared before another one is written


def test_a_byte_that_is_no_utf8_hides_neither_the_key_nor_what_is_expected(tmp_path: Path) -> None:
    release = release_with(tmp_path, environment_text(ODD))
    engine = {**ENGINES["vllm"], "api_key_env": "API_KEY"}
    assert find_api_key(Plan.load({"server": plan_of("vllm", 8000), "engine": engine}), release) == "sk-of-the-hand"
    assert live.expected_of(release).values == ODD


@pytest.mark.parametrize("text", ["export A='half", "export A=1\nexport B='", "\0"])
def test_one_that_is_damaged_has_no_variables(tmp_path: Path, text: str) -> None:
    assert release_with(tmp_path, text).read_environment() == {}
    assert ReleaseDirectory(str(tmp_path / "gone")).read_environment() == {}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("x --api-key k1 k2 --port 8", "x --api-key * * --port 8"),
        ("x --api-key=k1 --tp 8", "x --api-key=* --tp 8"),
        ("x --hf-token t --admin-api-key a", "x --hf-token * --admin-api-key *"),
        ("x --speculative-num-draft-tokens 3 --tokenizer /m", "x --speculative-num-draft-tokens 3 --tokenizer /m"),
        ("x --ssl-keyfile /etc/k.pem --ssl-keyfile-password p", "x --ssl-keyfile /etc/k.pem --ssl-keyfile-password *"),
        ("x --api_key k --max-total-tokens 9", "x --api_key * --max-total-tokens 9"),
    ],
)
def test_secrets_of_a_command_line_are_known_by_their_flags(words: str, shown: str) -> None:
    assert arguments.without_secrets(words.split(), "*") == shown.split()


def test_a_command_within_a_word_is_a_secret_as_a_whole() -> None:
    assert arguments.without_secrets(["sh", "-c", "exec x --api-key k"], "*") == ["sh", "-c", "*"]


def test_the_order_of_arguments_shows_no_key() -> None:
    one, two = ["x", "--api-key", "k3y", "a"], ["x", "a", "--api-key", "k3y"]
    hidden = [arguments.without_secrets(words, differences.HIDDEN) for words in (one, two)]
    assert "k3y" not in str(differences.of_words(differences.ARGV, "argv", *hidden))


@pytest.mark.parametrize("flag", [("--api-key", "k3y of $the 'hand'"), ("--api-key=k3y of $the 'hand'",)])
def test_an_adopted_key_rests_in_the_env_file_alone(tmp_path: Path, living: Living, flag: tuple[str, ...]) -> None:
    """And the launch script starts the very same command with the very same environment."""
    home = ServerHome(str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    program = "import sys, time; print(sys.argv, flush=True); time.sleep(600)"
    argv = (sys.executable, "-c", program, *flag, "--tp", "1")
    environment = {"PATH": os.environ["PATH"], "HF_TOKEN": "hf_k3y", **ODD}
    child = living.start(list(argv), stdout=subprocess.DEVNULL, env=environment)
    found = adopt.Found(process_of(child.pid), argv, str(tmp_path), environment, "127.0.0.1")
    server: dict[str, Any] = plan_of("sglang", 8000)
    release = adopt.write(found, home, server, ENGINES["sglang"], "tiny", (), "20260101T000000Z-abcdef")
    for base, _, names in os.walk(home.path):
        for name in names:
            path = Path(base, name)
            assert path == Path(release.env) or b"k3y" not in path.read_bytes(), path
    plan = release.read_plan()
    assert plan is not None
    assert find_api_key(plan, release) == "k3y of $the 'hand'"
    given = {name: value for name, value in release.read_environment().items() if name not in plan.argv_secrets}
    assert given == environment
    log = tmp_path / "log"
    with log.open("wb") as output:
        again = living.start([release.launch_script], stdout=output, env={f"{adopt.KEPT_APART}4": "the caller's"})
    assert until(log.read_bytes)
    assert process_of(again.pid).argv == argv
    now = Path(f"/proc/{again.pid}/environ").read_bytes().decode("utf-8", "surrogateescape")
    started = dict(pair.split("=", 1) for pair in now.split("\0") if pair)
    assert {name: value for name, value in started.items() if name not in ("PWD", "_", "OLDPWD")} == environment
