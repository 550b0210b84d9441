"""What hosts and servers may say: a wrong value is named with its file:line, a right one arrives as written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lamplighter.errors import InventoryError
from lamplighter.inventory import ConnectionSpec, EnvValue, Host, Server, load_inventory, resolve_secrets
from lamplighter.inventory.schema import HostVariables
from lamplighter.inventory.sources.yaml_file import read_mapping
from lamplighter.inventory.values import Problems, plain

PROJECT = Path(__file__).parents[2]
FILE = "inventory/host_vars/h.yml"
VERSION = "YAML reads this version as a number, and 0.10 would become 0.1: quote it; found"
PORT = "must be a whole number from 1 to 65535, in plain digits; found "
GPUS = "must be `all`, a list of indices [0, 1], or a list of UUIDs [GPU-..., ...]; found "
NAME = "is no name for an environment variable: letters, digits and _, not beginning with a digit"
BOOLEAN = (
    "YAML reads this as a boolean and the server would see '{}': "
    'write "{:d}", or the text that is meant, in quotes; found'
)
WHERE_STRICT = "a server has `lint: {ignore: [...]}`, and `lint: strict` stands beside `servers`"
SHOWN = "must be a version as `pip show` writes it, such as 0.5.16, or left out: then the node is asked; found"
ARG = "must be text, a number, true (a bare flag), a list (the flag repeated) or null (no flag); found"
SECRET = (
    "must be a reference, !secret env:NAME or !secret file:PATH, a vault, or a template with a lookup: no secret is "
    "written down here; found something else"
)
SECRETS_STAND = "must be text; found a secret (which may stand only under secrets, env, args and extra_args)"
STALL = "must be a number of seconds above 0, or `by phase`; found"
KEY = (
    "{}: not used: lamplighter logs in with keys (ansible_ssh_private_key_file, or an agent), and needs sudo without a "
    "password"
)
NO_NULL = "is text to YAML: write null for no flag, or put the flag with this text under `extra_args`"
HOST = "{}: must be a host name or an address; found the text '{}'"
LAB = "must be 1 to 40 of A-Z a-z 0-9 _ . - and begin with a letter or digit"
PRIORITY = "ansible_group_priority: has no effect here: it counts under `vars` of a group in the inventory itself"
NEEDED = {"engine": "demo", "model": "/m", "port": "8000"}


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def host(variables: str) -> Host:
    for name, text in {
        "roles/demo/engine.yml": "",
        "inventory/hosts.yml": "all: {hosts: {h: }}",
        FILE: variables,
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    return load_inventory(Path("inventory"), Path("roles")).host("h")


def server_text(*lines: str) -> str:
    """A server whose extra lines begin at line 3 of the file."""
    keys = [line.split(":")[0] for line in lines]
    needed = [f"{key}: {value}" for key, value in NEEDED.items() if key not in keys]
    return "servers:\n  s:\n" + "".join(f"    {line}\n" for line in [*lines, *needed])


def server(*lines: str) -> Server:
    return host(server_text(*lines)).servers["s"]


def wrong(variables: str) -> list[str]:
    with pytest.raises(InventoryError) as caught:
        host(variables)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def wrong_server(*lines: str) -> str:
    found = wrong(server_text(*lines))
    assert len(found) == 1, found
    return found[0]


# ---- Servers -------------------------------------------------------------------------------------------------------


def test_the_reference_of_defaults_says_what_the_schema_does() -> None:
    problems = Problems()
    found = plain(read_mapping(PROJECT / "roles" / "node" / "defaults.yml", problems))
    problems.raise_if_any()
    assert isinstance(found, dict)
    settings = found.pop("server")
    written = Server(name="s", engine="demo", model="m", port=1, **settings)
    assert settings["checks"]  # thresholds of the role's own check files: the schema knows none
    assert written == Server(name="s", engine="demo", model="m", port=1, checks=settings["checks"])
    assert HostVariables(**found) == HostVariables()
    spec = ConnectionSpec(host="h")
    assert (spec.python, spec.become, spec.host_key_checking, spec.connect_timeout) == (
        found["ansible_python_interpreter"],
        found["become"],
        found["host_key_checking"],
        found["connect_timeout"],
    )


def test_the_reference_names_every_setting() -> None:
    text = (PROJECT / "roles" / "node" / "defaults.yml").read_text(encoding="utf-8")
    for name in [*HostVariables.model_fields, *Server.model_fields]:
        assert name == "name" or f"{name}:" in text, name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("port: 08000", f"port: {PORT}the text '08000'"),
        ("port: 010", f"port: {PORT}the text '010'"),
        ("port: 0x1f40", f"port: {PORT}the text '0x1f40'"),
        ("port: 8_000", f"port: {PORT}the text '8_000'"),
        ("port: 0", f"port: {PORT}the number 0"),
        ("port: 65536", f"port: {PORT}the number 65536"),
        ("port: yes", f"port: {PORT}true (written yes)"),
        ("port: 8000.0", f"port: {PORT}the number 8000.0"),
        (
            "engine_version: 0.10",
            f"engine_version: {VERSION} the number 0.1 (written 0.10)",
        ),
        ("engine_version: main", f"engine_version: {SHOWN} the text 'main'"),
        ("engine_version: v0.11.0", f"engine_version: {SHOWN} the text 'v0.11.0'"),
        ("engine_version: 0.5.x", f"engine_version: {SHOWN} the text '0.5.x'"),
        ("engine_version: '>=0.5'", f"engine_version: {SHOWN} the text '>=0.5'"),
        (
            "lint: strict",
            f"lint: must be a mapping, not the text 'strict': {WHERE_STRICT}",
        ),
        (
            "lint: {ignore: [L15]}",
            "lint.ignore.0: must be a mapping, not the text 'L15': write {id: L15, reason: why it is right here}",
        ),
        (
            "lint: {ignore: {id: L15}}",
            "lint.ignore: must be a list, not a mapping: write [{id: L15, reason: why it is right here}]",
        ),
        ("served_name: on", "served_name: must be text; found true (written on)"),
        ("served_name: ''", "served_name: must not be empty; found the text ''"),
        ("model: 7", "model: must be text; found the number 7"),
        ("model: [a]", "model: must be text; found a list"),
        ("model: !secret env:X", f"model: {SECRETS_STAND}"),
        ('host: "0.0.0.0; x"', "host: must be a host name or an address; found the text '0.0.0.0; x'"),
        ('host: "\\n"', "host: must be one line, without control characters; found the text '\\n'"),
        ("host: http://x", "host: must be a host name or an address; found the text 'http://x'"),
        ('python: "/x\\e[2J"', "python: must be one line, without control characters; found the text '/x\\x1b[2J'"),
        ("gpus: none", f"gpus: {GPUS}the text 'none'"),
        ("gpus: 0", f"gpus: {GPUS}the number 0"),
        ("gpus: [0, GPU-1]", "gpus: must hold only indices (0, 1) or only UUIDs (GPU-...); found a list"),
        ("gpus: ['0']", "gpus: must hold only indices (0, 1) or only UUIDs (GPU-...); found a list"),
        ("gpus: [-1]", "gpus: must hold only indices (0, 1) or only UUIDs (GPU-...); found a list"),
        ("gpus: [0, 0]", "gpus: names a GPU twice"),
        ("launcher: docker", "launcher: must be `auto`, `systemd` or `detached`, not the text 'docker'"),
        ("launcher: off", "launcher: must be `auto`, `systemd` or `detached`, not false (written off)"),
        (
            "sitecustomize: {scope: node}",
            "sitecustomize.scope: must be `server`, `pth`, `interpreter` or `none`, not the text 'node'",
        ),
        ("sitecustomize: server", "sitecustomize: must be a mapping, not the text 'server'"),
        ("stale: {policy: all}", "stale.policy: must be `engine`, `ours` or `report`, not the text 'all'"),
        ("stale: {kill: sglang}", "stale.kill: must be a list, not the text 'sglang'"),
        ("stale: {kill: [a, 1]}", "stale.kill.1: must be text; found the number 1"),
        ("allow: Xorg", "allow: must be a list, not the text 'Xorg'"),
        ("gpus_unified: yes", "gpus_unified: must be `refuse` or `accept`, not true (written yes)"),
        ("timeouts: {ready: 45m}", "timeouts.ready: must be a number of seconds above 0; found the text '45m'"),
        ("timeouts: {stop: 0}", "timeouts.stop: must be a number of seconds above 0; found the number 0"),
        ("timeouts: {stop: 1:30}", "timeouts.stop: must be a number of seconds above 0; found the text '1:30'"),
        ("timeouts: {stall: x}", f"timeouts.stall: {STALL} the text 'x'"),
        ("timeouts: {redy: 5}", "timeouts.redy: unknown name (did you mean ready?)"),
        ("timeouts: 5", "timeouts: must be a mapping, not the number 5"),
        ("keep_releases: 0", f"keep_releases: {PORT.replace('65535', '1000')}the number 0"),
        ("args: [tp, 8]", "args: must be a mapping, not a list"),
        ("args: {--tp: 8}", "args.--tp: is written without dashes here: tp"),
        ("args: {'a b': 8}", "args.a b: is no name for a flag: put unusual ones under `extra_args`"),
        (
            "args: {json: {a: 1}}",
            f"args.json: {ARG} a mapping",
        ),
        ("args: {tp: None}", f"args.tp: None {NO_NULL}"),
        ("args: {tp: nUll}", f"args.tp: nUll {NO_NULL}"),
        ("args: {tp: NIL}", f"args.tp: NIL {NO_NULL}"),
        ("args: {x: [[1]]}", "args.x: a list here may hold only text and numbers"),
        ("args: {x: [true]}", "args.x: a list here may hold only text and numbers"),
        ("args: {x: on}", "args.x: write true for a bare flag, or quote the text that is meant: 'on'"),
        ("extra_args: --tp 8", "extra_args: must be a list, not the text '--tp 8'"),
        ("extra_args: [--tp, true]", "extra_args.1: must be text: quote it; found true"),
        ("env: {1A: x}", f"env.1A: {NAME}"),
        ("env: {A-B: x}", f"env.A-B: {NAME}"),
        (
            "env: {A: true}",
            f"env.A: {BOOLEAN.format('True', True)} true",
        ),
        (
            "env: {A: {value: off}}",
            f"env.A.value: {BOOLEAN.format('False', False)} false (written off)",
        ),
        (
            "env: {A: [x]}",
            "env.A: must be one text, with commas or whatever the server takes between its parts; found a list",
        ),
        ("env: {A: {mode: force}}", "env.A: `value` is missing"),
        ("env: {A: {value: x, mod: force}}", "env.A.mod: unknown name (did you mean mode?)"),
        ("env: {A: {value: x, mode: forced}}", "env.A.mode: must be `default` or `force`, not the text 'forced'"),
        (
            "secrets: {A: hunter2}",
            f"secrets.A: {SECRET}",
        ),
        ("secrets: {A-B: !secret env:X}", f"secrets.A-B: {NAME}"),
        ("engine: dmo", "engine: there is no roles/dmo/engine.yml (did you mean demo?)"),
        ("engine: zzz", "engine: there is no roles/zzz/engine.yml; known are demo"),
        ("modle: x", "modle: unknown name (did you mean model?)"),
        ("zzz: x", "zzz: unknown name"),
        (
            "api_key: x",
            (
            "api_key: unknown name: put the key under `secrets`, or pass the engine's flag under `args`, from a vault"
            " or a lookup"
            ),
        ),
        ("name: x", "name: unknown name: the name of a server is the key above its settings"),
        ("hooks: {}", "hooks: unknown name: this version does not offer it"),
        ("notify: {}", "notify: unknown name: this version does not offer it"),
        ("bench: {}", "bench: unknown name: this version does not offer it"),
        ("variants: {}", "variants: unknown name: this version does not offer it"),
        ("checks: []", "checks: must be a mapping, not a list"),
        (
            "checks: {A: 1}",
            "checks.A: is no name of a check or a threshold: a-z, digits and _, beginning with a letter",
        ),
        (
            "checks: {a: blocks}",
            (
            "checks.a: must be blocker, warning or off for a check, a number or a list for a threshold;"
            " found the text 'blocks'"
            ),
        ),
        ("nodes: []", "nodes: unknown name: this version does not offer it"),
    ],
)  # fmt: skip
def test_a_wrong_setting_of_a_server(line: str, expected: str) -> None:
    assert wrong_server(line) == f"{FILE}:3: servers.s.{expected}"


def test_a_wrong_secret_is_never_shown() -> None:
    assert "hunter2" not in wrong_server("secrets: {A: hunter2}")
    assert "hunter2" not in wrong_server("secrets: hunter2")
    with pytest.raises(ValidationError) as caught:
        Server.model_validate({"name": "s", "engine": "demo", "model": "m", "port": 1, "secrets": {"A": "hunter2"}})
    assert "hunter2" not in str(caught.value)


def test_what_is_missing_points_at_the_server() -> None:
    assert wrong("\nservers:\n  s:\n    engine: demo\n") == [
        f"{FILE}:3: servers.s: `model` is missing",
        f"{FILE}:3: servers.s: `port` is missing",
    ]
    assert wrong("servers:\n  s: 5\n") == [f"{FILE}:2: servers.s: must be a mapping, not the number 5"]
    assert wrong("servers: [s]\n") == [f"{FILE}:1: servers: must be a mapping of servers by name, not a list"]


def test_all_mistakes_of_a_host_come_together() -> None:
    assert wrong("root: x\n" + server_text("prot: 1", "args:", "  tp: yes", "gpus: x", "env: {A: no}")) == [
        f"{FILE}:1: root: must begin with / or ~/; found the text 'x'",
        f"{FILE}:6: servers.s.args.tp: write true for a bare flag, or quote the text that is meant: 'yes'",
        f"{FILE}:7: servers.s.gpus: {GPUS}the text 'x'",
        f"{FILE}:8: servers.s.env.A: {BOOLEAN.format('False', False)} false (written no)",
        f"{FILE}:4: servers.s.prot: unknown name (did you mean port?)",
    ]


@pytest.mark.parametrize("name", ["Kimi", "-a", ".a", "a b", "a/b", "ä", "x" * 41])
def test_names_a_server_may_not_have(name: str) -> None:
    (found,) = wrong(server_text().replace("  s:", f"  {name!r}:"))
    assert found.startswith(f"{FILE}:2: servers.{name}: the name must be 1 to 40 of a-z 0-9 _ . -")


@pytest.mark.parametrize("name", ["0", "kimi-k2.5_int4", "x" * 40, "on"])
def test_names_a_server_may_have(name: str) -> None:
    assert host(server_text().replace("  s:", f"  {name}:")).servers[name].name == name


def test_two_servers_on_one_port_are_named_with_both_lines() -> None:
    two = server_text() + "  t:\n    engine: demo\n    model: m\n    port: 8000\n"
    assert wrong(two) == [f"{FILE}:9: servers.t.port: 8000 is the port of servers.s too ({FILE}:5)"]


def test_a_former_name_is_nobodys_by_now() -> None:
    two = server_text("was: t") + "  t: {engine: demo, model: m, port: 8001, was: u}\n"
    assert wrong(two) == [f"{FILE}:3: servers.s.was: t is the name of servers.t, which is there still"]
    assert wrong_server("was: s").endswith("servers.s.was: s is its own name")
    assert "must be the name of a server" in wrong_server("was: A/B")
    assert host(server_text("was: u")).servers["s"].was == "u"


def test_two_servers_may_share_gpus() -> None:
    found = host(server_text("gpus: [0]") + "  t: {engine: demo, model: m, port: 8001, gpus: [0]}\n").servers
    assert found["s"].gpus == found["t"].gpus == (0,)


def test_a_variable_cannot_be_a_secret_too() -> None:
    assert wrong_server("env: {A: x}", "secrets: {A: !secret env:A}") == (
        f"{FILE}:4: servers.s.secrets.A: also stands under env ({FILE}:3): keep one of them"
    )


def test_env_and_arguments_are_what_was_written() -> None:
    found = server(
        "env: {A: 010, B: 0.10, C: 12:30, D: 1_000, E: 2024-01-01, F: '', G: 1, H: {value: 0x1f, mode: force}, I: ~}",
        "args: {tp: 8, frac: 0.90, same: 0.5, time: 12:30, trust: true, no: false, many: [1, 0.10, x], gone: null}",
        "extra_args: [--seed, 007, --x=1.10, 5]",
    )
    assert {name: value.value for name, value in found.env.items()} == {
        "A": "010", "B": "0.10", "C": "12:30", "D": "1_000", "E": "2024-01-01", "F": "", "G": "1", "H": "0x1f",
    }  # fmt: skip
    assert {value.mode for name, value in found.env.items() if name != "H"} == {"default"}
    assert found.env["H"] == EnvValue(value="0x1f", mode="force")
    assert found.args == {
        "tp": 8, "frac": "0.90", "same": 0.5, "time": "12:30", "trust": True, "no": False, "many": (1, "0.10", "x"),
    }  # fmt: skip
    assert type(found.args["tp"]) is int
    assert found.args["trust"] is True
    assert found.extra_args == ("--seed", "007", "--x=1.10", "5")


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1))
def test_a_model_is_any_text_to_the_byte(model: str) -> None:
    written = "".join(f"\\U{ord(each):08x}" for each in model)
    assert server(f'model: !unsafe "{written}"').model == model


@pytest.mark.parametrize("gpus", ["all", (), (0, 7), ("GPU-424e617b-5f17-760b-4b58-7348de85eb90", "MIG-1")])
def test_gpus(gpus: object) -> None:
    written = gpus if isinstance(gpus, str) else f"[{', '.join(map(str, gpus))}]"  # type: ignore[call-overload]
    assert server(f"gpus: {written}").gpus == gpus


def test_a_quoted_version_and_an_unquoted_one_that_is_text() -> None:
    assert server("engine_version: '0.10'").engine_version == "0.10"
    for version in ("0.5.16", "0.5.3.post3", "0.11.1rc5", "0.5.24.dev3+gabc123.d20260101", "'0.5'"):
        assert server(f"engine_version: {version}").engine_version == version.strip("'")
    assert server("timeouts: {stall: 90}").timeouts.stall == 90


def test_a_server_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        server().port = 1  # type: ignore[misc]


def test_a_nul_byte_is_refused_where_it_stands() -> None:
    assert wrong_server(r'model: "a\0b"').startswith(f"{FILE}:3: a NUL byte")
    with pytest.raises(ValidationError, match="NUL"):
        Server(name="s", engine="demo", model="a\0b", port=1)


# ---- Secrets -------------------------------------------------------------------------------------------------------


def test_secrets_are_resolved_late_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = server("secrets: {HF_TOKEN: !secret env:MY_TOKEN}")
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    assert resolve_secrets(found) == {"HF_TOKEN": "hunter2"}
    assert "hunter2" not in f"{found!r}{found.to_json()}"


def test_all_absent_secrets_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    found = server("secrets:", "  A: !secret env:MY_TOKEN", "  B: !secret file:absent")
    with pytest.raises(InventoryError) as caught:
        resolve_secrets(found)
    first, second = str(caught.value).splitlines()
    assert first == (
        f"{FILE}:4: servers.s.secrets.A: !secret env:MY_TOKEN: the environment variable is not set "
        "(export MY_TOKEN on this machine before the run)"
    )
    assert second.startswith(
        f"{FILE}:5: servers.s.secrets.B: !secret file:absent: inventory/host_vars/absent cannot be"
    )


# ---- Host variables ------------------------------------------------------------------------------------------------


def test_a_host_that_says_nothing() -> None:
    found = host("")
    assert found.connection == ConnectionSpec(host="h")
    assert (found.root, found.lab, dict(found.servers)) == (None, None, {})


def test_every_host_variable() -> None:
    found = host(
        "ansible_host: 10.0.0.1\nansible_port: 2222\nansible_user: ops\nansible_ssh_private_key_file: ~/.ssh/id\n"
        "ansible_python_interpreter: /usr/bin/python3.12\nbecome: yes\nroot: ~/l\nlab: demo\n"
        "host_key_checking: off\nknown_hosts: ./known\nconnect_timeout: 2.5\n"
    )
    assert found.connection == ConnectionSpec(
        "10.0.0.1", 2222, "ops", "~/.ssh/id", "/usr/bin/python3.12", True, "off", "./known", 2.5
    )
    assert (found.root, found.lab) == ("~/l", "demo")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ansible_user: [ops]", "ansible_user: must be text; found a list"),
        ("become: 'perhaps'", "become: must be true or false; found the text 'perhaps'"),
        ("root: relative/path", "root: must begin with / or ~/; found the text 'relative/path'"),
        ("root: ~other/x", "root: must begin with / or ~/; found the text '~other/x'"),
        ("host_key_checking: no", "host_key_checking: must be `strict`, `accept-new` or `off`, not false (written no)"),
        ("connect_timeout: soon", "connect_timeout: must be a number of seconds above 0; found the text 'soon'"),
        ('ansible_host: "\\n"', "ansible_host: must be one line, without control characters; found the text '\\n'"),
        ("ansible_host: -oProxyCommand=x", HOST.format("ansible_host", "-oProxyCommand=x")),
        ("ansible_user: -l", "ansible_user: must be the name of a user; found the text '-l'"),
        ('known_hosts: "a\\eb"', "known_hosts: must be one line, without control characters; found the text 'a\\x1bb'"),
        ("lab: ../x", f"lab: {LAB}; found the text '../x'"),
        ("lab: /x", f"lab: {LAB}; found the text '/x'"),
        ("lint: loud", "lint: must be `warn` or `strict`, not the text 'loud'"),
        ("lint: {ignore: []}", "lint: must be `warn` or `strict`, not a mapping: `ignore` stands under a server"),
    ],
)  # fmt: skip
def test_a_wrong_host_variable(line: str, expected: str) -> None:
    assert wrong(line + "\n") == [f"{FILE}:1: {expected}"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ansible_prot: 22", "ansible_prot: unknown name (did you mean ansible_port?)"),
        ("ansible_ssh_usr: x", "ansible_ssh_usr: unknown name (did you mean ansible_ssh_user?)"),
        ("server: {}", "server: unknown name (did you mean servers?)"),
        ("becom: true", "becom: unknown name (did you mean become?)"),
        ("roots: /x", "roots: unknown name (did you mean root?)"),
        ("ansible_password: x", KEY.format("ansible_password")),
        ("ansible_become_pass: x", KEY.format("ansible_become_pass")),
        ("ansible_group_priority: 5", PRIORITY),
        ("NCCL_PROTO: LL", None),
        ("ntp_server: 10.0.0.9", None),
        ("docker: {version: 27}", None),
        ("ansible_remote_tmp: /tmp/a", None),
        ("ansible_ssh_pipelining: yes", None),
    ],
)
def test_a_variable_of_others_stops_nothing_and_a_near_miss_is_told(line: str, expected: str | None) -> None:
    found = host(line + "\n" + server_text())
    assert [str(each) for each in found.warnings] == ([f"{FILE}:1: {expected}"] if expected else [])
    lint = found.to_json()["lint"]
    assert [(each["level"], each["origin"]) for each in lint] == [("warning", f"{FILE}:1")] * len(lint)
    assert list(found.servers) == ["s"]
    if expected:
        assert wrong(line + "\nlint: strict\n") == [f"{FILE}:1: {expected} (lint: strict)"]


@pytest.mark.parametrize("address", ["10.0.0.1", "gpu1.example.net", "fe80::1%eth0", "::1", "[::1]", "gpu_1", "gpü1"])
def test_addresses(address: str) -> None:
    assert host(f"ansible_host: '{address}'\n").connection.host == address
    assert server(f"host: '{address}'").host == address


@pytest.mark.parametrize("words", ["servers: {s: null}", "servers: {s: ~, t: null}", "servers: null"])
def test_a_host_may_drop_what_its_group_says_also_where_a_role_has_thresholds(words: str) -> None:
    Path("roles/node").mkdir(parents=True)
    Path("roles/node/defaults.yml").write_text("server: {checks: {shm_free_gib: 4}}\n", encoding="utf-8")
    Path("inventory/group_vars").mkdir(parents=True)
    Path("inventory/group_vars/all.yml").write_text("servers: {s: {env: {A: b}}}\n", encoding="utf-8")
    assert host(words + "\n").servers == {}


def test_what_a_group_says_of_a_server_that_a_host_lacks_is_told_at_the_group() -> None:
    Path("inventory/group_vars").mkdir(parents=True)
    Path("inventory/group_vars/all.yml").write_text("servers:\n  s: {env: {A: b}}\n", encoding="utf-8")
    assert wrong("root: /x\n")[0] == "inventory/group_vars/all.yml:2: servers.s: `engine` is missing"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("ansible_ssh_host: 10.0.0.1", {"host": "10.0.0.1"}),
        ("ansible_host: 10.0.0.9\nansible_ssh_host: 10.0.0.1", {"host": "10.0.0.1"}),
        ("ansible_ssh_port: '2222'\nansible_ssh_user: ops", {"port": 2222, "user": "ops"}),
        ("ansible_private_key_file: ~/k", {"key_file": "~/k"}),
        ("ansible_become: 'yes'", {"become": True}),
        ("become: 0", {"become": False}),
        ("ansible_user: 1000", {"user": "1000"}),
        ("ansible_host_key_checking: false", {"host_key_checking": "off"}),
        ("ansible_host_key_checking: false\nhost_key_checking: accept-new", {"host_key_checking": "accept-new"}),
        ("ansible_ssh_common_args: -o StrictHostKeyChecking=no -C", {"host_key_checking": "off", "ssh_options": ()}),
        ("ansible_ssh_timeout: 30", {"connect_timeout": 30}),
        ("ansible_python_interpreter: auto_silent", {"python": "python3"}),
        ("ansible_python_interpreter: /usr/bin/env python3.11", {"python": "python3.11"}),
        ("ansible_connection: ssh", {}),
        ("ansible_connection: ansible.builtin.paramiko_ssh", {}),
        ("ansible_ssh_common_args: -o ProxyJump=bastion", {"ssh_options": (("proxyjump", "bastion"),)}),
        ("ansible_ssh_extra_args: -J a,b -o 'ForwardAgent yes' -A", {"ssh_options": (("proxyjump", "a,b"),)}),
        (
            """ansible_ssh_common_args: '-o ProxyCommand="ssh -W %h:%p -q ops@bastion" -o ControlMaster=auto'""",
            {"ssh_options": (("proxycommand", "ssh -W %h:%p -q ops@bastion"),)},
        ),
        ("ansible_become: true\nansible_become_method: sudo\nansible_become_user: root", {"become": True}),
        ("ansible_become_user: llm", {}),
    ],
)
def test_what_ansible_says_of_a_connection_is_understood(lines: str, expected: dict[str, object]) -> None:
    found = host(lines + "\n" + server_text())
    assert {name: getattr(found.connection, name) for name in expected} == expected
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("ansible_connection: local", "ansible_connection: this machine itself is reached over SSH as any other"),
        ("ansible_connection: winrm", "ansible_connection: only SSH is spoken, not winrm"),
        ("ansible_connection: community.docker.docker", "ansible_connection: only SSH is spoken, not community.docker"),
        ("ansible_shell_type: powershell", "ansible_shell_type: nodes run Linux"),
        ("ansible_become_method: doas\nbecome: true", "ansible_become_method: root is reached through sudo alone"),
        ("ansible_become_user: llm\nbecome: true", "ansible_become_user: only root is become"),
        ("ansible_ssh_common_args: -S other", "ansible_ssh_common_args: -S other is not followed: write it for this"),
        ("transport: telnet", "transport: "),
        ("ansible_ssh_args: -o PermitLocalCommand=yes", "ansible_ssh_args: -o permitlocalcommand is not followed"),
        ("ansible_ssh_extra_args: '-o \"X'", "ansible_ssh_extra_args: no closing quotation in"),
        ("ansible_ssh_extra_args: bastion", "ansible_ssh_extra_args: 'bastion' is no option of ssh"),
        ("ansible_host: <your address>", "ansible_host: must be a host name or an address; found the text '<your addr"),
        ("ansible_host: 10.0.0.1; x", "ansible_host: must be a host name or an address; found the text '10.0.0.1; x'"),
        ("ansible_host: ''", "ansible_host: must not be empty"),
        ("ansible_port: 99999", f"ansible_port: {PORT}the number 99999"),
        ("ansible_port: <port>", f"ansible_port: {PORT}the text '<port>'"),
        ("ansible_ssh_port: 0022", f"ansible_port: {PORT}the text '0022'"),
        ("ansible_user: your user", "ansible_user: must be the name of a user; found the text 'your user'"),
        ("ansible_ssh_private_key_file: ''", "ansible_ssh_private_key_file: must not be empty"),
    ],
)
def test_what_cannot_be_met_is_an_error_where_there_are_servers_alone(lines: str, expected: str) -> None:
    (found,) = wrong(lines + "\n" + server_text())
    assert found.startswith(f"{FILE}:1: {expected}")
    (told,) = host(lines + "\n").warnings
    assert str(told).startswith(f"{FILE}:1: {expected}")


def test_a_placeholder_is_shown_as_written() -> None:
    found = host("ansible_host: <ip of gpu1>\nansible_user: $USER NAME\n")
    assert (found.connection.host, found.connection.user) == ("<ip of gpu1>", "$USER NAME")
    assert str(found.origins["ansible_user"]) == f"{FILE}:2"
    assert [each.id for each in found.warnings] == ["placeholder", "placeholder"]
    assert len(wrong("lint: strict\nansible_host: <ip>\n")) == 1


# ---- The example ---------------------------------------------------------------------------------------------------


def test_the_example_inventory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for engine in ("demo", "sglang"):
        (tmp_path / "roles" / engine).mkdir(parents=True)
        (tmp_path / "roles" / engine / "engine.yml").touch()
    monkeypatch.chdir(PROJECT)
    inventory = load_inventory(PROJECT / "inventory", tmp_path / "roles")
    demo, gpu1 = inventory.resolve(inventory.select(["demo", "pcie_8x"]))
    assert (demo.lab, demo.root, demo.servers["demo"].port, demo.servers["demo"].gpus) == (
        "demo",
        "~/lamplighter",
        18000,
        "all",
    )
    kimi = gpu1.servers["kimi"]
    assert (gpu1.connection.host, kimi.engine_version, kimi.port, kimi.args["tp"]) == (
        "gpu1.example.net",
        "0.5.16",
        8000,
        8,
    )
    assert kimi.args["speculative-algorithm"] == "EAGLE3"
    assert kimi.env["NCCL_P2P_LEVEL"] == EnvValue(value="SYS", mode="force")
    origin = gpu1.origins["servers.kimi.env.NCCL_PROTO"]
    assert origin.file == "inventory/group_vars/pcie_8x.yml"
    assert "NCCL_PROTO: LL" in (PROJECT / origin.file).read_text(encoding="utf-8").splitlines()[origin.line - 1]
