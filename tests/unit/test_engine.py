"""The engine.yml of the roles and their reader: inheritance, mistakes with file and line, command lines."""

# ruff: noqa: E501 (a line of a log, or of a message, stays one line)

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from lamplighter.errors import InventoryError
from lamplighter.inventory.schema import Server
from lamplighter.release.engine import load_engine, load_engines
from lamplighter.release.engine_file import engine_names
from lamplighter.release.release import build_release, server_plan

PROJECT = Path(__file__).resolve().parents[2]
ROLES = PROJECT / "roles"

PARENT = """\
launch:
  command: ['{python}', -m, zebra]
  flags: {model: --model, served_name: --name, host: --host, port: --port}
identity: {source: models, path: /v1/models, field: data.*.id, equals: ['{served_name}']}
generate: {kind: chat, path: /v1/chat/completions, body: {messages: []}}
processes: {titles: ['^zebra::'], entry_points: ['zebra']}
stop: {signal: TERM}
benign: [harmless]
phases:
  - {name: boot, patterns: [starting]}
failures:
  - id: gpu_oom
    patterns: ['out of stripes']
    hint: lower servers.{server}.args.stripes
"""


def role(roles: Path, name: str, text: str) -> None:
    (roles / name).mkdir(parents=True, exist_ok=True)
    (roles / name / "engine.yml").write_text(text)


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    role(tmp_path / "roles", "zebra", PARENT)
    return tmp_path / "roles"


def server(**given: Any) -> Server:
    return Server(
        **{"name": "kimi", "engine": "zebra", "model": "/m", "port": 8000, "python": "/opt/x/bin/python", **given}
    )


def refused(roles: Path, name: str, text: str) -> str:
    role(roles, name, text)
    with pytest.raises(InventoryError) as caught:
        load_engine(name, roles)
    return str(caught.value)


# -- the roles that are here


def test_every_engine_of_the_project_loads_and_travels_as_json() -> None:
    engines = load_engines(ROLES)
    assert {"sglang", "vllm", "transformers"} <= set(engines)
    assert "torch" not in engines
    for name, engine in engines.items():
        assert engine.compiled["name"] == name
        assert json.loads(json.dumps(engine.compiled)) == engine.compiled
        assert engine.compiled["phases"][-1]["name"] == "ready"
        assert {"path", "timeout", "veto_status"} == set(engine.compiled["health"]) - {"generates"}


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        (
            "sglang",
            "/v/bin/python -m sglang.launch_server --model-path /m --served-model-name k --host 0.0.0.0 --port 8000",
        ),
        ("vllm", "/v/bin/python /v/bin/vllm serve /m --served-model-name k --host 0.0.0.0 --port 8000"),
        ("transformers", "/v/bin/python /v/bin/transformers serve /m --host 0.0.0.0 --port 8000"),
        ("llama_cpp", "/o/llama-server --model /m --alias k --host 0.0.0.0 --port 8000"),
    ],
)
def test_the_command_line_of_each_engine(name: str, argv: str) -> None:
    python, program = "/v/bin/python", "/o/llama-server" if name == "llama_cpp" else None
    wanted = server(engine=name, python=python, program=program, served_name="k", host="0.0.0.0")
    assert load_engine(name, ROLES).argv(wanted) == argv.split()


@pytest.mark.parametrize(
    ("name", "line", "is_title"),
    [
        ("sglang", "sglang::schedul", True),
        ("sglang", "sglang::detokenizer", True),
        ("sglang", "/v/bin/python -m sglang.launch_server --model-path /m", False),
        ("sglang", "/v/bin/python /v/bin/sglang serve --model-path /m", False),
        ("vllm", "VLLM::EngineCor", True),
        ("vllm", "VLLM::Worker_TP0", True),
        ("vllm", "/v/bin/python /v/bin/vllm serve /m", False),
        ("vllm", "/v/bin/python -m vllm.entrypoints.openai.api_server --model /m", False),
        ("transformers", "/v/bin/python3 /v/bin/transformers serve /m", False),
    ],
)
def test_processes_are_recognised_by_title_or_entry_point(name: str, line: str, is_title: bool) -> None:
    looks = load_engine(name, ROLES).compiled["processes"]
    assert any(re.search(pattern, line) for pattern in looks["titles" if is_title else "entry_points"])


@pytest.mark.parametrize(
    "line",
    [
        "vi /home/me/vllm/serve.py",
        "grep -r sglang.launch_server .",
        "python bench.py --url vllm",
        "tail -f sglang serve.log",
    ],
)
def test_a_word_in_an_argument_makes_no_process_an_engines(line: str) -> None:
    for engine in load_engines(ROLES).values():
        looks = engine.compiled["processes"]
        assert not any(re.search(pattern, line) for pattern in looks["titles"])


def test_no_wording_of_a_log_is_copied_between_the_roles() -> None:
    own: dict[tuple[str, str], str] = {}
    for name in ("torch", "sglang", "vllm", "transformers"):
        text = (ROLES / name / "engine.yml").read_text()
        failures = text[text.index("\nfailures:") :] if "\nfailures:" in text else ""
        for pattern in re.findall(r"^ +- '(.+)'$|patterns: \['(.+)'\]$", failures, re.M):
            key = pattern[0] or pattern[1]
            assert own.setdefault((key, ""), name) == name, f"{key} is in {own[key, '']} and in {name}"


def test_the_log_reader_knows_no_servers_wording_and_runs_on_the_nodes_python() -> None:
    source = (PROJECT / "lamplighter" / "node" / "log" / "watch.py").read_text()
    tree = ast.parse(source, feature_version=(3, 9))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    outside = {name for name in modules | names if name and not name.startswith("lamplighter.node.")}
    assert {name.split(".")[0] for name in outside} <= set(sys.stdlib_module_names)
    for word in ("sglang", "vllm", "nccl", "cuda", "traceback (most", "errno"):
        strings = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert not any(word in each.lower() for each in strings), word


# -- inheritance


def test_a_child_adds_wording_merges_mappings_and_replaces_the_rest(roles: Path) -> None:
    role(
        roles,
        "foal",
        """\
extends: zebra
launch: {command: [foal]}
processes: {titles: ['^foal::']}
benign: [calm]
failures:
  - id: port_in_use
    patterns: [taken]
hints:
  gpu_oom: 'feed servers.{server}'
generate: {body: {prompt: x}}
""",
    )
    engine = load_engine("foal", roles)
    compiled = engine.compiled
    assert compiled["ancestors"] == ["zebra"]
    assert compiled["launch"]["command"] == ["foal"]
    assert compiled["launch"]["flags"]["model"] == "--model"
    assert compiled["processes"] == {"titles": ["^foal::"], "entry_points": ["zebra"]}
    assert compiled["benign"] == ["calm", "harmless"]
    assert [each["id"] for each in compiled["failures"]] == ["port_in_use", "gpu_oom"]
    assert compiled["generate"] == {"kind": "chat", "path": "/v1/chat/completions", "body": {"prompt": "x"}}
    assert compiled["hints"] == {"gpu_oom": "feed servers.{server}"}
    assert engine_names(roles) == ["foal", "zebra"]


def test_null_takes_a_parents_word_back(roles: Path) -> None:
    role(roles, "zebra", PARENT + "health: {path: /health}\n")
    role(roles, "foal", "extends: zebra\nhealth: null\nlaunch: {flags: {served_name: null}}\n")
    engine = load_engine("foal", roles)
    assert engine.compiled["health"] is None
    assert engine.argv(server(served_name="k"))[3:7] == ["--model", "/m", "--host", "127.0.0.1"]


def test_wording_without_launch_is_no_engine(roles: Path) -> None:
    assert "launch is missing" in refused(roles, "ground", "benign: [x]\n")
    assert engine_names(roles) == ["zebra"]


def test_an_unknown_engine_names_those_there_are(roles: Path) -> None:
    with pytest.raises(InventoryError) as caught:
        load_engine("zebar", roles)
    assert "did you mean zebra?" in str(caught.value)


# -- mistakes

MISTAKES = [
    ("extends: zebra\nfailurs: []\n", "roles/bad/engine.yml:2: failurs: unknown key (did you mean failures?)"),
    ("extends: zebra\nfailures:\n  - id: x\n    patterns: ['(']\n", "roles/bad/engine.yml:4: failures.0.patterns.0: is no regular expression"),
    ("extends: zebra\nfailures:\n  - id: x\n    patterns: ['a*']\n", "roles/bad/engine.yml:4: failures.0.patterns.0: matches an empty line"),
    ("extends: zebra\nfailures:\n  - patterns: [x]\n", "roles/bad/engine.yml:3: failures.0.id: is missing"),
    ("extends: zebra\nfailures:\n  - {id: x, patterns: [x], genral: true}\n", "(did you mean general?)"),
    ("extends: zebra\nfailures:\n  - {id: x, patterns: [x], hint: 'see {serve}'}\n", "{serve} is not {server}"),
    ("extends: zebra\nphases:\n  - {name: bot, patterns: [x]}\n", "roles/bad/engine.yml:3: phases.0.name: must be one of boot, distributed"),
    ("extends: zebra\nrank: ['TP(\\d)']\n", "roles/bad/engine.yml:2: rank.0: must have a group (?P<rank>...)"),
    ("extends: zebra\nlaunch:\n  command: ['{pyton}']\n", "roles/bad/engine.yml:3: launch.command.0: {pyton} is not one of"),
    ("extends: zebra\nlaunch:\n  flags: {modl: --x}\n", "roles/bad/engine.yml:3: launch.flags.modl"),
    ("extends: zebra\nstop: {grace: 5}\n", "roles/bad/engine.yml:2: stop.grace: unknown key"),
    ("extends: zebra\nstop: {scope: root}\n", "roles/bad/engine.yml:2: stop.scope: unknown key"),
    ("extends: zebra\nstop: {signal: KILL}\n", "roles/bad/engine.yml:2: stop.signal"),
    ("extends: zebra\nbenign: x\n", "roles/bad/engine.yml:2: benign: must be a list"),
    ("extends: zebra\noverwrites: [{name: X, effect: y, versions: old}]\n", "roles/bad/engine.yml:2: overwrites.0.versions"),
    ("extends: zebar\n", "roles/bad/engine.yml:1: extends: roles have no zebar/engine.yml (did you mean zebra?)"),
    ("extends: bad\n", "roles/bad/engine.yml:1: extends: bad -> bad goes round in a circle"),
    ("extends: zebra\nbenign: [x]\nbenign: [y]\n", "roles/bad/engine.yml:3: benign is given twice"),
    ("a: [\n", "roles/bad/engine.yml"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_is_named_with_file_and_line(roles: Path, text: str, said: str) -> None:
    assert said in refused(roles, "bad", text)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("faults", "xids:\n  79: {mean: x}\n", "roles/node/faults.yml:2: xids.79.mean: unknown key (did you mean means?)"),
        ("faults", "stuck:\n  - {in: '(', advice: x}\n", "roles/node/faults.yml:2: stuck.0.in: is no regular expression"),
        ("faults", "hints: {tls: 'see {serve}'}\n", "roles/node/faults.yml:1: hints.tls: {serve} is not {server}"),
        ("programs", "watcher: [gpud]\n", "roles/node/programs.yml:1: watcher: unknown key (did you mean watchers?)"),
    ],
)  # fmt: skip
def test_a_mistake_in_what_is_about_the_node_is_named_with_file_and_line(
    roles: Path, name: str, text: str, said: str
) -> None:
    (roles / "node").mkdir()
    (roles / "node" / f"{name}.yml").write_text(text)
    assert said in refused(roles, "bad", "extends: zebra\n")


def test_mistakes_of_parent_and_child_come_together(roles: Path) -> None:
    role(roles, "zebra", PARENT + "wrapers: []\n")
    said = refused(roles, "bad", "extends: zebra\nbening: []\n")
    assert "roles/bad/engine.yml:2: bening" in said
    assert "roles/zebra/engine.yml:15: wrapers" in said


def test_a_new_failure_takes_four_lines(roles: Path) -> None:
    role(
        roles,
        "zebra",
        PARENT
        + """\
  - id: too_many_stripes
    patterns: ['zebra\\.StripeError']
    hint: lower servers.{server}.args.stripes
""",
    )
    from lamplighter.node.log.whole import diagnose_log

    found = diagnose_log(b"zebra.StripeError: 9\n", {"zebra": load_engine("zebra", roles).compiled}, "zebra")
    assert (found.cause, found.hint_for("kimi")) == ("too_many_stripes", "lower servers.kimi.args.stripes")


# -- command lines


def test_args_become_flags_in_the_order_written(roles: Path) -> None:
    wanted = server(
        args={
            "tp": 8,
            "trust": True,
            "no": False,
            "gone": None,
            "mem": "0.90",
            "lora": ("a", "b b"),
            "x": 0.5,
            "none": (),
        },
        extra_args=("--raw", "1 2"),
    )
    assert load_engine("zebra", roles).argv(wanted)[9:] == [
        "--tp", "8", "--trust", "--mem", "0.90", "--lora", "a", "--lora", "b b", "--x", "0.5", "--raw", "1 2",
    ]  # fmt: skip


def test_a_program_of_any_kind_is_started_and_named_by_the_engines_own_rule() -> None:
    llama = load_engine("llama_cpp", ROLES)
    wanted = server(engine="llama_cpp", program="llama-server", model="/models/q/tiny.gguf")
    assert llama.argv(wanted)[:3] == ["llama-server", "--model", "/models/q/tiny.gguf"]
    assert (llama.served_name(wanted), llama.is_python) == ("tiny.gguf", False)
    assert load_engine("vllm", ROLES).served_name(wanted) == "/models/q/tiny.gguf"
    assert llama.argv(wanted)[3:5] == ["--alias", "tiny.gguf"]
    with pytest.raises(InventoryError, match=r"servers\.kimi\.program: is missing"):
        llama.argv(server(engine="llama_cpp"))

    plan = server_plan(cast(Any, None), server(engine="llama_cpp", program="/o/llama-server"), llama)
    assert (plan["python"], plan["sitecustomize"], plan["served_name"]) == ("", {"scope": "none"}, "m")
    files = build_release(cast(Any, None), server(engine="llama_cpp", program="/o/llama-server"), llama, PROJECT).files
    assert "pysite/sitecustomize.py" not in files
    assert "export PATH=/o:/usr/local/sbin" in files["launch.sh"].text.replace("'", "")


def test_what_lies_beside_a_program_needs_its_directory(roles: Path) -> None:
    role(roles, "mule", "extends: zebra\nlaunch: {command: ['{bin}/serve'], python: false}\n")
    engine = load_engine("mule", roles)
    assert engine.argv(server(program="/o/bin/mule"))[0] == "/o/bin/serve"
    with pytest.raises(InventoryError, match=r"servers\.kimi\.program: must be a path, not 'mule'"):
        engine.argv(server(program="mule"))


def test_a_served_name_is_a_flag_only_when_given(roles: Path) -> None:
    engine = load_engine("zebra", roles)
    assert "--name" not in engine.argv(server())
    assert engine.argv(server(served_name="k"))[5:7] == ["--name", "k"]


def test_values_are_filled_in_once(roles: Path) -> None:
    role(roles, "zebra", PARENT.replace("zebra]", "zebra, '{model}']", 1))
    assert load_engine("zebra", roles).argv(server(model="{port}/m"))[3] == "{port}/m"


def test_a_flag_with_a_setting_of_its_own_is_refused(roles: Path) -> None:
    with pytest.raises(InventoryError) as caught:
        load_engine("zebra", roles).argv(server(args={"port": 1}))
    assert "servers.kimi.args.port" in str(caught.value)
    assert "write servers.kimi.port instead" in str(caught.value)


def test_an_engine_with_a_program_beside_its_python_needs_that_pythons_path() -> None:
    with pytest.raises(InventoryError) as caught:
        load_engine("vllm", ROLES).argv(server(engine="vllm", python="python3"))
    assert "servers.kimi.python: must be a path" in str(caught.value)


def test_what_an_engine_needs_is_checked_and_merged(roles: Path) -> None:
    needs = "needs: {package: zebra, room: {shm_mib: 16, tmp_mib: 64}, ports: [{uses: [RPC], flags: [--rpc-port]}]}\n"
    role(roles, "plains", f"{PARENT}{needs}")
    role(roles, "grevy", "extends: plains\nneeds: {package: null, room: {shm_mib: 32}}\n")
    merged = load_engine("grevy", roles).compiled["needs"]
    assert (merged["package"], merged["room"]) == (None, {"shm_mib": 32, "tmp_mib": 64})
    assert merged["ports"] == [{"uses": ["RPC"], "flags": ["--rpc-port"]}]
    for wrong, says in (
        ("ports: [{flags: [--rpc-port]}]", "needs.ports.0.uses: is missing"),
        ("ports: [{uses: [RPC], flags: [rpc-port]}]", "needs.ports.0.flags.0"),
        ("packages: zebra", "needs.packages: unknown key (did you mean package?)"),
        ("room: {shm_mib: much}", "needs.room.shm_mib"),
    ):
        assert says in refused(roles, "plains", f"{PARENT}needs: {{{wrong}}}\n")
