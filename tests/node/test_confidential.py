"""What is hidden, by which name, and what is not: declared secrets by value, others' by the name of their flag."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from lamplighter.node import confidential
from lamplighter.node.confidential import Confidential, looks_secret
from lamplighter.node.health import differences
from lamplighter.node.journal import Journal
from lamplighter.node.keeper import ownership
from lamplighter.node.layout import ServerHome
from tests.node.living import process_of

HIDE = Confidential(
    [("TOKEN", "hf_secret-value"), ("KEY", 'a "quoted" \\ key'), ("PEM", "first-line\nsecond-line")]
).hide


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("key hf_secret-value refused", "key $TOKEN refused"),
        ({"a": [{"hf_secret-value": ("x", "hf_secret-value")}]}, {"a": [{"$TOKEN": ["x", "$TOKEN"]}]}),
        (json.dumps({"k": 'a "quoted" \\ key'}), '{"k": "$KEY"}'),
        ("only second-line was printed", "only $PEM was printed"),
        ("python -m x --key hf_secret\u2026", "python -m x --key $TOKEN\u2026"),
        ("hf_se\u2026", "hf_se\u2026"),  # less of it than gives it away
        (3, 3),
        (None, None),
    ],
)
def test_a_declared_secret_is_hidden_wherever_it_stands(data: object, shown: object) -> None:
    assert HIDE(data) == shown


def test_a_path_of_the_node_stays_readable(tmp_path: Path) -> None:
    hide = Confidential([("HF_HOME", str(tmp_path)), ("TOKEN", "/aaaa+bbbb/cccc")]).hide
    assert hide(f"{tmp_path}/hub and /aaaa+bbbb/cccc") == f"{tmp_path}/hub and $TOKEN"


def test_a_short_secret_is_no_reason_to_spoil_every_text() -> None:
    assert Confidential([("DEBUG", "1")]).hide("port 8001, tp 1") == "port 8001, tp 1"
    assert Confidential().hide({"a": "b"}) == {"a": "b"}


def release(home: Path, name: str, env: str, plan: dict[str, object]) -> None:
    place = home / "releases" / name
    place.mkdir(parents=True)
    (place / "env").write_text(env)
    (place / "launch.sh").write_text("")
    (place / "plan.json").write_text(json.dumps({"server": PLAN, "engine": {"name": "demo"}, **plan}))


PLAN = {
    "name": "s", "engine": "demo", "engine_version": None, "model": "m", "served_name": "m", "host": "h", "port": 1,
    "gpus": "all", "python": "p", "argv": ["x"], "env": {}, "sitecustomize": {"scope": "server"}, "launcher": "auto",
    "stale": {"policy": "engine", "kill": []}, "timeouts": {"stop": 1, "free": 1, "ready": 1}, "keep_releases": 1,
    "gpus_unified": "refuse", "allow": [],
}  # fmt: skip


def test_the_secrets_of_every_release_count_and_of_an_adopted_one_what_is_called_so(tmp_path: Path) -> None:
    home = ServerHome(str(tmp_path / "s"))
    release(tmp_path / "s", "aaaaaaaaaaaa", "export T='old token'\nexport CUDA_VISIBLE_DEVICES=GPU-1234567\n", {})
    release(tmp_path / "s", "adopted-1", "export HOME=/home/ops\nexport API_KEY=adopted-key\n", {"adopted": {"pid": 1}})
    hide = confidential.of_homes([home], {"secrets": {"T": "new token"}}).hide
    text = "old token, new token, adopted-key, /home/ops, GPU-1234567"
    assert hide(text) == "$T, $T, $API_KEY, /home/ops, GPU-1234567"
    assert confidential.of_homes([home]).hide("new token") == "new token"


def test_a_journal_never_holds_what_is_hidden(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "events.jsonl"), str(tmp_path / "ballast"), {"run": "r"}, hide=HIDE)
    journal.write({"event": "progress", "message": "said hf_secret-value"})
    journal.close()
    assert json.loads((tmp_path / "events.jsonl").read_text())["message"] == "said $TOKEN"


@pytest.mark.parametrize(
    ("flag", "value", "is_secret"),
    [
        ("--api-key", "sk-1", True),
        ("HF_TOKEN", "hf", True),
        ("--password", "x", True),
        ("--speculative-num-draft-tokens", "3", False),
        ("--max-num-batched-tokens", "many", False),
        ("--tokenizer", "/models/t", False),
        ("--ssl-keyfile", "/etc/key.pem", False),
        ("--num-token", "8", False),
        ("--api-key", None, False),
    ],
)
def test_of_others_a_flag_that_is_called_a_key_holds_one(flag: str, value: str | None, is_secret: bool) -> None:
    assert looks_secret(flag, value) is is_secret


def test_a_draft_of_three_tokens_is_no_secret_anywhere() -> None:
    words = ["serve", "--speculative-num-draft-tokens", "3", "--api-key", "theirs"]
    assert (
        ownership.shown_command(dataclasses.replace(process_of(os.getpid()), argv=tuple(words)))
        == "serve --speculative-num-draft-tokens 3 --api-key ***"
    )
    (found,) = differences.of_words("argv", "argv", words, [*words[:2], "4", *words[3:]])
    assert (found.wanted, found.found) == ("3", "4")


def test_places_of_secret_words_are_no_difference_of_their_own() -> None:
    held = {"argv": ["serve", "--key", "$LAMPLIGHTER_ARGS_KEY"], "argv_secrets": {"LAMPLIGHTER_ARGS_KEY": 2}}
    moved = {"argv": ["serve", "-v", "--key", "$LAMPLIGHTER_ARGS_KEY"], "argv_secrets": {"LAMPLIGHTER_ARGS_KEY": 3}}
    assert [each.name for each in differences.of_plans(moved, held)] == ["args -v"]


def test_beside_a_secret_argument_no_other_value_is_shown() -> None:
    held = ["serve", "--lock-word", "$LAMPLIGHTER_ARGS_LOCK_WORD"]
    (found,) = differences.of_words("argv", "argv", held, ["serve", "--lock-word", "somebody-elses"])
    assert (found.wanted, found.found) == ("$LAMPLIGHTER_ARGS_LOCK_WORD", "(hidden)")
