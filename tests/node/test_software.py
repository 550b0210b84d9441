"""What the node's own software makes of a server: NCCL's names and files, a draft model, changed files of an engine."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.start import software
from lamplighter.node.start.ground import Finding, Start
from lamplighter.release.engine import load_engine

PROJECT = Path(__file__).resolve().parents[2]
LIBRARY = b"\x7fELF\0NCCL version 2.27.5+cuda12.9\0%s\0NCCL_PROTO\0NCCL_IB_HCA\0NCCL_\0NCCL_lower\0XNCCL_ALGO\0NCCL_NET"


@pytest.fixture(autouse=True)
def no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of NCCL's and no library but those that a test writes."""
    monkeypatch.setattr(software, "NCCL_FILES", (str(tmp_path / "etc-nccl.conf"),))
    monkeypatch.setattr(software, "_SYSTEM", ())


def start(environment: Mapping[str, str] | None = None, **given: Any) -> Start:
    plain: dict[str, Any] = {
        "name": "kimi", "argv": (sys.executable, "-c", "pass"), "python": sys.executable,
        "environment": {"HOME": "/nowhere", **(environment or {})},
        "model": "a-name", "host": "127.0.0.1", "port": 18000, "gpus": 0,
        "engine": {"name": "zebra"},
    }  # fmt: skip
    return Start(**{**plain, **given})


def found(asked: Start, **lint: Any) -> list[Finding]:
    return list(software.examine(asked, lint))


# -- NCCL's names


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    path = tmp_path / "lib" / "libnccl.so.2"
    path.write_bytes(LIBRARY)
    return path


def test_the_names_of_a_library_are_what_lies_between_two_nuls(library: Path) -> None:
    assert software.read_library(str(library)) == ({"NCCL_PROTO", "NCCL_IB_HCA", "NCCL_NET"}, "2.27.5")


@pytest.mark.parametrize("content", [b"", b"\0" * 100])
def test_what_is_no_library_knows_nothing_and_accuses_nobody(content: bytes, library: Path) -> None:
    library.write_bytes(content)
    asked = start({"LD_LIBRARY_PATH": str(library.parent)})
    assert found(asked, nccl=["NCCL_PROTO"]) == []


def test_a_name_that_this_nccl_does_not_know_is_told(library: Path) -> None:
    asked = start({"LD_LIBRARY_PATH": f"/nowhere:{library.parent}"})
    (one,) = found(asked, nccl=["NCCL_PROTO", "NCCL_MNNVL_ENABLE"])
    assert (one.id, one.level, one.evidence) == ("nccl_name", "warning", str(library))
    assert one.message == "NCCL 2.27.5 of this node does not know NCCL_MNNVL_ENABLE, and ignores it without a word"
    assert found(asked, nccl=["NCCL_MNNVL_ENABLE"], ignore=[["nccl_name", "NCCL_MNNVL_ENABLE"]]) == []
    assert len(found(asked, nccl=["NCCL_MNNVL_ENABLE"], ignore=[["nccl_name", "NCCL_PROTO"]])) == 1


def test_the_library_beside_the_engine_is_found(tmp_path: Path) -> None:
    site = package(tmp_path, {})
    (site / "nvidia" / "nccl" / "lib").mkdir(parents=True)
    (site / "nvidia" / "nccl" / "lib" / "libnccl.so.2").write_bytes(LIBRARY)
    (one,) = found(zebra(site), nccl=["NCCL_SPEED"])
    assert one.evidence.endswith("site/nvidia/nccl/lib/libnccl.so.2")


# -- NCCL's files


def test_settings_are_read_to_the_letter() -> None:
    text = "# no\nNCCL_PROTO = LL\nexport X=1\n NCCL_ALGO=Ring\nNCCL_DEBUG=a=b\r\nnothing\n"
    assert software.read_settings(text) == [
        ("NCCL_PROTO ", " LL"),
        ("export X", "1"),
        (" NCCL_ALGO", "Ring"),
        ("NCCL_DEBUG", "a=b"),
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("NCCL_ALGO=Ring", "adds NCCL_ALGO, of which the inventory says nothing"),
        ("NCCL_PROTO=Simple", "says otherwise of NCCL_PROTO than the inventory, which wins"),
        ("NCCL_PROTO = Simple", "is no name: it has no effect"),
        ("NCCL_PROTO=LL", ""),
        ("# NCCL_ALGO=Ring", ""),
    ],
)
@pytest.mark.parametrize("place", ["etc-nccl.conf", ".nccl.conf", "own.conf"])
def test_what_a_file_adds_or_contradicts(line: str, told: str, place: str, tmp_path: Path) -> None:
    (tmp_path / place).write_text(f"{line}\n")
    where = {"NCCL_CONF_FILE": str(tmp_path / place)} if place == "own.conf" else {"HOME": str(tmp_path)}
    findings = found(start({"NCCL_PROTO": "LL", **where}))
    assert [(each.id, each.level) for each in findings] == ([("nccl_file", "warning")] if told else [])
    assert all(told in each.message and str(tmp_path / place) in each.message for each in findings)


def test_a_file_that_is_named_stands_in_for_the_one_at_home(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    assert found(start({"HOME": str(tmp_path), "NCCL_CONF_FILE": "/nowhere/nccl.conf"})) == []


# -- a draft model

TARGET = {"hidden_size": 4096, "vocab_size": 128256, "num_hidden_layers": 32}


def models(tmp_path: Path, target: Mapping[str, Any], draft: Mapping[str, Any]) -> tuple[str, str]:
    for name, config in {"target": target, "draft": draft}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "target"), str(tmp_path / "draft")


@pytest.mark.parametrize(
    ("target", "draft", "method", "told"),
    [
        (TARGET, TARGET, "EAGLE3", None),
        (TARGET, {**TARGET, "hidden_size": 2048}, "EAGLE3", ("error", "hidden states of 2048 numbers")),
        (TARGET, {**TARGET, "hidden_size": 2048, "target_hidden_size": 4096}, "EAGLE3", None),
        (TARGET, {**TARGET, "hidden_size": 2048}, "STANDALONE", None),
        (TARGET, {**TARGET, "vocab_size": 32000}, "STANDALONE", ("warning", "32000 tokens, the target's 128256")),
        (TARGET, {**TARGET, "draft_vocab_size": 32000}, "EAGLE3", None),
        ({**TARGET, "num_hidden_layers": 4}, TARGET, "EAGLE3", ("error", "before layers [2, 2, 1]")),
        ({**TARGET, "num_hidden_layers": 7}, TARGET, "EAGLE3", None),
        ({**TARGET, "num_hidden_layers": 4}, TARGET, "EAGLE", None),
        (
            {**TARGET, "num_hidden_layers": 4},
            {**TARGET, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
            "EAGLE3",
            None,
        ),
        (
            {**TARGET, "num_hidden_layers": 4},
            {**TARGET, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            "EAGLE3",
            ("error", "[2, 3, 4], and those must be different ones of 4"),
        ),
        ({"text_config": TARGET}, {**TARGET, "hidden_size": 2048}, "EAGLE", ("error", "the target's have 4096")),
    ],
)
def test_a_draft_model_against_its_target(
    target: Mapping[str, Any],
    draft: Mapping[str, Any],
    method: str,
    told: tuple[str, str] | None,
    tmp_path: Path,
) -> None:
    model, path = models(tmp_path, target, draft)
    words = ("--speculative-algorithm", method, "--speculative-draft-model-path", path)
    findings = found(start(engine={**rules("sglang"), "distribution": None}, model=model, argv=words))
    assert [(each.id, each.level) for each in findings] == ([("draft_model", told[0])] if told else [])
    assert told is None or told[1] in findings[0].message


def test_a_draft_model_may_be_named_in_json(tmp_path: Path) -> None:
    model, path = models(tmp_path, TARGET, {**TARGET, "hidden_size": 8})
    words = ("--speculative-config", json.dumps({"method": "eagle3", "model": path}))
    (one,) = found(start(engine={**rules("vllm"), "distribution": None}, model=model, argv=words))
    assert (one.id, one.level) == ("draft_model", "error")


@pytest.mark.parametrize("words", [("--speculative-config", "{"), ("--speculative-config", "[]"), ()])
def test_nobody_is_accused_where_no_draft_is_told(words: tuple[str, ...], tmp_path: Path) -> None:
    model, _ = models(tmp_path, TARGET, {})
    assert found(start(engine={**rules("vllm"), "distribution": None}, model=model, argv=words)) == []


def rules(engine: str) -> dict[str, Any]:
    return load_engine(engine, PROJECT / "roles").compiled


# -- the engine's files


def package(tmp_path: Path, changed: Mapping[str, str]) -> Path:
    """A directory for PYTHONPATH with zebra 1.5 as installed, and what was changed or (with "") removed since."""
    site = tmp_path / "site"
    (site / "zebra").mkdir(parents=True)
    metadata = site / "zebra-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: zebra\nVersion: 1.5\n")
    rows = []
    for name in ("zebra/__init__.py", "zebra/engine.py"):
        (site / name).write_text("pass\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"pass\n").digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},5\n")
    (metadata / "RECORD").write_text("".join(rows))
    for name, text in changed.items():
        (site / name).write_text(text) if text else (site / name).unlink()
    return site


def zebra(site: Path) -> Start:
    engine = {"name": "zebra", "distribution": "zebra", "needs": {"package": "zebra"}}
    return start({"PYTHONPATH": str(site)}, engine=engine)


@pytest.mark.parametrize(
    ("changed", "evidence"),
    [
        ({}, None),
        ({"zebra/engine.py": "patched\n"}, "zebra/engine.py"),
        ({"zebra/engine.py": "patch\n", "zebra/__init__.py": ""}, "zebra/engine.py, zebra/__init__.py"),
    ],
)
def test_files_of_the_engine_that_somebody_has_changed(
    changed: Mapping[str, str], evidence: str | None, tmp_path: Path
) -> None:
    asked = zebra(package(tmp_path, changed))
    findings = list(software.changed_files(asked, {}))
    assert [(each.id, each.level, each.evidence) for each in findings] == (
        [("engine_files", "warning", evidence)] if evidence else []
    )
    assert list(software.changed_files(asked, {"ignore": [["engine_files", None]]})) == []


def test_an_engine_without_a_package_has_no_files() -> None:
    assert list(software.changed_files(start(), {})) == []
