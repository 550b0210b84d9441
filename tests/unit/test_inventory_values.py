"""Templates, vaults and secrets in values: what they come to, what taints them, and what is told of the rest."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lamplighter.errors import InventoryError, UsageError
from lamplighter.inventory import (
    Host,
    Inventory,
    Vault,
    limits,
    load_inventory,
    password_sources,
    resolve_secrets,
    templates,
)

CASES = Path(__file__).resolve().parent.parent / "cases" / "vault"
SEALED = (CASES / "value.vault").read_text()
CANARY = "sk-CANARY-vaulted"
SERVER = "servers:\n  s:\n    engine: demo\n    model: m\n    port: 8000\n"


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(files: Mapping[str, str], vault: Vault | None = None) -> Inventory:
    for name, text in {"roles/demo/engine.yml": "", **files}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    return load_inventory(Path("inventory"), Path("roles"), vault)


def gpu1(variables: str, server: str = "", vault: Vault | None = None) -> Host:
    said = variables + "\n" + (SERVER + server if server else "")
    return load({"inventory/hosts.yml": "all: {hosts: {gpu1: }}", "inventory/host_vars/gpu1.yml": said}, vault).host(
        "gpu1"
    )


def refusal(variables: str, server: str = "", vault: Vault | None = None) -> str:
    with pytest.raises(InventoryError) as caught:
        gpu1(variables, server, vault)
    return str(caught.value)


def argument(template: str, variables: str = "", vault: Vault | None = None) -> Any:
    """What a template comes to, as an argument of a server keeps its type."""
    return gpu1(variables, f"    args: {{x: {template!r}}}\n", vault).servers["s"].args["x"]


def password(text: str = "pw1", label: str = "") -> Vault:
    Path("pw").write_text(text + "\n")
    return Vault(password_sources([] if label else ["pw"], [f"{label}@pw"] if label else [], {}))


def indented(text: str, by: int) -> str:
    return "".join(" " * by + line + "\n" for line in text.splitlines())


# What ansible-core 2.19 makes of the same template; tests/oracle compares the two at length.
@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ 5 }}", 5),
        ("{{ 5 }}{{ 6 }}", "56"),
        (" {{ 5 }}", " 5"),
        ("{{ true }}", True),
        ("{{ true }}!", "True!"),
        ("{{ [1, 2] }}", (1, 2)),
        ("x{{ nothing }}y", "xy"),
        ("x{{ 1 if false }}", "x"),
        ("{% for i in [1] %}{{ i }}{% endfor %}", 1),
        ("{{ nope | default(7) }}", 7),
        ("{{ nope.a.b | default('d') }}", "d"),
        ("{{ needs_nope | default('d') }}", "d"),
        ("{{ paths.bin }}", "/opt/bin"),
        ("{{ paths['base'] | basename }}", "opt"),
        ("{{ '{{ 5 }}' }}", "{{ 5 }}"),
        ("{{ inventory_hostname_short }}-{{ group_names | join }}", "gpu1-ungrouped"),
        ("{{ groups['all'] | length }}", 1),
        ("{{ hostvars['gpu1'].paths.base }}", "/opt"),
        ("{{ 'yes' | bool }}", True),
        ("{{ '5' | int + 1 }}", 6),
        ("{{ 'abc' | regex_replace('(b)', '<\\\\1>') }}", "a<b>c"),
        ("{{ 'abc' | regex_search('z') is none }}", True),
        ("{{ {'b': 1, 'a': [true]} | to_json }}", '{"b": 1, "a": [true]}'),
        ("{{ ('[1, 2]' | from_json)[1] }}", 2),
        ("{{ ({'a': {'x': 1}} | combine({'a': {'y': 2}}, recursive=true)).a | length }}", 2),
        ("{{ none | ternary('a', 'b', 'c') }}", "c"),
        ("{{ '' | default('e', true) }}", "e"),
        ("{{ 'eA==' | b64decode | ansible.builtin.b64encode }}", "eA=="),
        ("{{ '1.10' is version('1.9', '>') and '1.0' is ansible.builtin.version('1.0.1', 'lt') }}", True),
        ("{{ 'abc' is match('b') or 'abc' is search('c$') }}", True),
        ("{{ [3, 1, 3] | unique | max }}", 3),
        ("{{ 'a b' | quote }}", "'a b'"),
        ("{{ lookup('vars', 'num') + query('vars', 'num')[0] }}", 10),
        ("{{ [[1], [2, [3]]] | flatten | sum }}", 6),
    ],
)
def test_a_template_comes_to_what_it_does_in_ansible(template: str, value: object) -> None:
    variables = "num: 5\nnothing: null\npaths: {base: /opt, bin: '{{ paths.base }}/bin'}\nneeds_nope: '{{ nope }}'\n"
    found = argument(template, variables)
    assert (found, type(found)) == (value, type(value))


def test_templates_reach_connection_and_server_settings_with_their_types() -> None:
    host = gpu1(
        "ansible_host: '{{ inventory_hostname }}.example.net'\nansible_port: '{{ base + 22 }}'\nbase: 2200\n"
        "become: \"{{ 'no' | bool }}\"\nmodels: /models\n",
        "    gpus: '{{ [0, 1] }}'\n    env: '{{ common | combine({''B'': ''2''}) }}'\n    python: '{{ models }}/py'\n"
        "    served_name: '{{ omit }}'\ncommon: {A: '1'}\n",
    )
    assert (host.connection.host, host.connection.port, host.connection.become) == ("gpu1.example.net", 2222, False)
    server = host.servers["s"]
    assert (server.gpus, server.python, server.served_name) == ((0, 1), "/models/py", None)
    assert {name: each.value for name, each in server.env.items()} == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ nope }}", "'nope' is undefined"),
        ("{{ needs_nope }}", "needs_nope (inventory/host_vars/gpu1.yml:1) needs it: 'nope' is undefined"),
        ("{{ ring }}", "templates in a circle: ring (inventory/host_vars/gpu1.yml:2) > gnir"),
        ("{{ 5", "no template: "),
        ("{{ 5 | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{{ ().__class__ }}", "unsafe"),
        ("{{ lookup('pipe', 'touch ran') }}", "only env, file, vars"),
        ("{{ 'x' + 1 }}", "TypeError"),
        ("{{ [vars_of_ring] }}", "templates in a circle: "),
        ("{{ {'a': [inner]} }}", "inner.b (inventory/host_vars/gpu1.yml:5) needs it: 'nope' is undefined"),
        ("{{ halved }}", "halved (inventory/host_vars/gpu1.yml:6): the template failed (ZeroDivisionError"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ 'a' * 9 ** 19 }}", "needs more than 256 MiB"),
        ("{{ 'x' | center(10 ** 10) }}", "needs more than 256 MiB"),
        ("{{ '{:>9999999999999999}'.format(5) }}", "needs more than 256 MiB"),
    ],
)
def test_what_cannot_be_filled_in_is_an_error_with_its_place(template: str, said: str) -> None:
    variables = "needs_nope: '{{ nope }}'\nring: '{{ gnir }}'\ngnir: '{{ ring }}'\n"
    variables += "vars_of_ring: {x: '{{ ring }}'}\ninner: {b: '{{ nope }}'}\nhalved: '{{ 1 / 0 }}'\n"
    text = refusal(variables, f"    args: {{x: {template!r}}}\n")
    assert text.startswith("inventory/host_vars/gpu1.yml:")
    assert "servers.s.args.x: " in text
    assert said in text
    assert not os.path.exists("ran")


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [LOOP, "{{ ('a' * 40) | regex_replace('(a+)+$b', '') }}", "{{ ['a' * 40] | map('regex_replace', '(a+)+$b', '') }}"],
)
def test_a_template_without_an_end_is_an_error_of_its_place(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    before = (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM))
    text = refusal("", f"    args: {{x: {template!r}}}\n")
    assert text.startswith("inventory/host_vars/gpu1.yml:")
    assert "servers.s.args.x: the template " in text
    assert "without an end" in text
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


@pytest.mark.parametrize("error", [limits.TooLongError, MemoryError])
def test_the_limit_holds_between_any_two_lines(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates.Templates, "_fill", Mock(side_effect=error))
    assert "servers.s.args.x: the template " in refusal("", "    args: {x: '{{ 5 }}'}\n")


def test_a_template_of_a_group_that_never_ends_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    inventory = load({"inventory/hosts.yml": "g: {hosts: {'h[1:200]': }, vars: {ansible_user: \"" + LOOP + '"}}\n'})
    began = time.process_time()
    for host in inventory.resolve(inventory.hosts):
        assert [lint.variable for lint in host.warnings] == ["ansible_user"]
    assert time.process_time() - began < 200 * 0.05


def test_a_vault_program_does_not_inherit_the_limit_of_templates() -> None:
    lifted = limits.Limits()
    outside = resource.getrlimit(resource.RLIMIT_AS)
    with lifted.limited():
        assert resource.getrlimit(resource.RLIMIT_AS) != outside
        with lifted.lifted():
            assert resource.getrlimit(resource.RLIMIT_AS) == outside
        assert resource.getrlimit(resource.RLIMIT_AS) != outside


@pytest.mark.parametrize("template", ["{{ hostvars }}", "{{ hostvars.gpu1 }}", "{{ [hostvars['gpu1'].servers] }}"])
def test_a_template_that_holds_itself_is_an_error_with_its_place(template: str) -> None:
    text = refusal("", f'    env: {{A: "{template}"}}\n')
    assert text.startswith("inventory/host_vars/gpu1.yml:")
    assert "servers.s.env.A: " in text


def test_broken_templates_of_other_variables_and_hosts_stop_nobody() -> None:
    files = {
        "inventory/hosts.yml": (
            "all: {hosts: {gpu1: {theirs: '{{ nope }}'}, web1: {ansible_host: '{{ nope }}'},"
            " gpu2: {ansible_host: '{{ nope }}', servers: {kimi: {engine: demo, model: m, port: 8000}}},"
            " gpu3: {servers: '{{ nope }}'}}}"
        ),
        "inventory/group_vars/all.yml": "also_theirs: '{{ 5'\n",
    }
    inventory = load(files)
    assert inventory.host("gpu1").connection.host == "gpu1"
    idle = inventory.host("web1")  # nobody logs in there
    assert idle.connection.host == "web1"
    assert [(lint.variable, "'nope' is undefined" in lint.message) for lint in idle.warnings] == [
        ("ansible_host", True)
    ]
    with pytest.raises(InventoryError, match="ansible_host: 'nope' is undefined"):
        inventory.host("gpu2")
    with pytest.raises(InventoryError, match="servers: 'nope' is undefined"):
        inventory.host("gpu3")


def test_unsafe_stays_text_at_any_depth() -> None:
    server = gpu1("", "    args: {chat: !unsafe '{{ x }}'}\n    extra_args: !unsafe ['{% y %}', b]\n").servers["s"]
    assert (server.args["chat"], server.extra_args) == ("{{ x }}", ("{% y %}", "b"))


# -- secrets


@pytest.mark.parametrize(
    "written",
    [
        "    env: {HF_TOKEN: \"{{ lookup('env', 'HF_TOKEN') }}\"}\n",
        "    env: {HF_TOKEN: {value: \"{{ lookup('env', 'HF_TOKEN') | trim }}\"}}\n",
        "    secrets: {HF_TOKEN: \"{{ token | default('x') }}\"}\n",
        "    env: '{{ shared }}'\n",
        "    env: {HF_TOKEN: !secret env:HF_TOKEN}\n",
        "    secrets: {HF_TOKEN: \"{{ lookup('file', 'token') }}\"}\n",
        '    secrets: {HF_TOKEN: "{{ hostvars.gpu1.shared.HF_TOKEN }}"}\n',
    ],
)
def test_what_comes_from_this_machine_is_a_secret_through_every_template(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-CANARY")
    Path("inventory").mkdir()
    Path("inventory/token").write_text("hf-CANARY\n")
    variables = "token: \"{{ lookup('env', 'HF_TOKEN') }}\"\nshared: {A: plain, HF_TOKEN: '{{ token }}'}\n"
    host = gpu1(variables, written)
    server = host.servers["s"]
    assert "HF_TOKEN" not in server.env
    assert resolve_secrets(server) == {"HF_TOKEN": "hf-CANARY"}
    assert "CANARY" not in str(host.to_json()) + repr(host)
    if "shared }}" in written:
        assert server.env["A"].value == "plain"


def test_a_secret_that_is_not_there_refuses_what_needs_it_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server = gpu1("", "    env: {HF_TOKEN: \"x{{ lookup('env', 'HF_TOKEN') }}\"}\n").servers["s"]
    with pytest.raises(InventoryError) as caught:
        resolve_secrets(server)
    assert "servers.s.secrets.HF_TOKEN: the environment variable HF_TOKEN is not set" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_reference_that_a_template_passes_on_is_missed_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server = gpu1("token: !secret env:HF_TOKEN\n", "    env: {HF_TOKEN: 'x{{ token }}'}\n").servers["s"]
    with pytest.raises(InventoryError, match="the environment variable is not set"):
        resolve_secrets(server)
    monkeypatch.setenv("HF_TOKEN", "hf-CANARY")
    server = gpu1("token: !secret env:HF_TOKEN\n", "    env: {HF_TOKEN: 'x{{ token }}'}\n").servers["s"]
    assert resolve_secrets(server) == {"HF_TOKEN": "xhf-CANARY"}


def test_a_place_that_everybody_sees_takes_what_is_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.delenv("NOT_SET", raising=False)
    server = "    served_name: \"{{ lookup('env', 'MODELS') }}/kimi\"\n"
    assert gpu1("", server).servers["s"].served_name == "/models/kimi"
    missing = "    served_name: \"{{ lookup('env', 'NOT_SET') }}/kimi\"\n"
    assert "the environment variable NOT_SET is not set" in refusal("", missing)
    replaced = "    served_name: \"{{ lookup('env', 'NOT_SET') | default('/d', true) }}/kimi\"\n"
    assert gpu1("", replaced).servers["s"].served_name == "/d/kimi"


def test_a_secret_argument_is_shown_as_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-CANARY")
    written = "    args: {api-key: \"{{ lookup('env', 'KEY') }}\", speculative-num-draft-tokens: 3}\n"
    host = gpu1("", written + "    extra_args: [!secret env:KEY]\n")
    shown = host.to_json()["servers"]["s"]
    assert shown["args"] == {"api-key": "{{ lookup('env', 'KEY') }}", "speculative-num-draft-tokens": 3}
    assert shown["extra_args"] == ["!secret env:KEY"]
    assert set(resolve_secrets(host.servers["s"]).values()) == {"sk-CANARY"}
    assert len(resolve_secrets(host.servers["s"])) == 2


def test_what_was_probably_meant_to_be_a_secret_is_a_warning_at_its_place() -> None:
    written = "    env: {HF_TOKEN: $HF_TOKEN, API_KEY: sk-plain, A_TOKEN: '3', KEYS: x}\n"
    host = gpu1("", written + "    args: {api-key: sk-plain, hf-token: EMPTY, num-draft-tokens: many}\n")
    found = {each["variable"]: each for each in host.to_json()["lint"]}
    assert {name: each["id"] for name, each in found.items()} == {
        "servers.s.env.HF_TOKEN": "shell-variable",
        "servers.s.env.API_KEY": "plain-secret",
        "servers.s.args.api-key": "plain-secret",
    }
    assert "{{ lookup('env', 'HF_TOKEN') }}" in found["servers.s.env.HF_TOKEN"]["message"]
    assert found["servers.s.env.API_KEY"]["origin"] == "inventory/host_vars/gpu1.yml:7"
    assert host.servers["s"].env["HF_TOKEN"].value == "$HF_TOKEN"


def test_no_error_quotes_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-CANARY")
    for written in (
        "    port: \"{{ lookup('env', 'KEY') | int('sk') + [] }}\"\n",
        "    args: {x: \"{{ lookup('env', 'KEY') | from_json }}\"}\n",
        "    env: {A: {value: \"{{ lookup('env', 'KEY') }}\", mode: force}}\n",
        "    secrets: {A: plain-CANARY}\n",
    ):
        assert "CANARY" not in refusal("", written.replace("    port", "    keep_releases"))


def test_plain_text_under_secrets_is_refused_through_a_template_too() -> None:
    assert "no secret is written down here" in refusal("token: plain-CANARY\n", "    secrets: {A: '{{ token }}'}\n")


# -- vaults


def test_a_vaulted_value_is_opened_when_it_is_needed_and_hidden_everywhere() -> None:
    sealed = "key: !vault |\n" + indented(SEALED, 2)
    host = gpu1(sealed, "    args: {api-key: '{{ key }}'}\n    secrets: {T: 'a{{ key }}'}\n", password())
    assert sorted(resolve_secrets(host.servers["s"]).values()) == [f"a{CANARY}", CANARY]
    assert "CANARY" not in str(host.to_json()) + repr(host)
    assert gpu1(sealed, "    args: {a: 1}\n").servers["s"].args["a"] == 1  # nobody needs it: no password is asked for


def test_a_vaulted_login_is_used_and_not_shown() -> None:
    host = gpu1("ansible_user: !vault |\n" + indented(SEALED, 2), vault=password())
    assert host.connection.user == CANARY
    shown = host.to_json()
    assert shown["connection"]["user"] == "!vault (inventory/host_vars/gpu1.yml:1)"
    assert shown["origins"]["connection.user"] == "inventory/host_vars/gpu1.yml:1"
    assert "CANARY" not in str(shown)


def test_a_vaulted_value_where_everybody_would_read_it_is_refused() -> None:
    text = refusal("m: !vault |\n" + indented(SEALED, 2), "    served_name: '{{ m }}'\n", password())
    assert "servers.s.served_name: comes out of a vault" in text
    assert "CANARY" not in text


@pytest.mark.parametrize(
    ("vault", "said"),
    [
        (Vault, "no vault password is given"),
        (lambda: password("wrong"), "no password fits"),
        (lambda: Vault(password_sources(["absent"], [], {})), "absent cannot be read"),
    ],
)
def test_a_vault_that_cannot_be_opened_refuses_what_needs_it(vault: Any, said: str) -> None:
    with pytest.raises((InventoryError, UsageError)) as caught:
        resolve_secrets(
            gpu1("k: !vault |\n" + indented(SEALED, 2), "    secrets: {A: '{{ k }}'}\n", vault()).servers["s"]
        )
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_vault_that_is_cut_off_is_damaged() -> None:
    cut = SEALED.strip()[:-3]
    with pytest.raises(InventoryError, match="is damaged"):
        resolve_secrets(
            gpu1("k: !vault |\n" + indented(cut, 2), "    secrets: {A: '{{ k }}'}\n", password()).servers["s"]
        )


def vaulted_group() -> dict[str, str]:
    return {
        "inventory/hosts.yml": "all: {children: {gpu: {hosts: {gpu1: }}, web: {hosts: {web1: }}}}",
        "inventory/group_vars/gpu/vault.yml": (CASES / "group_vars.yml").read_text(),
        "inventory/group_vars/gpu/main.yml": SERVER + "    env: {TOKEN: '{{ who }}'}\n",
    }


def test_a_vaulted_file_is_opened_for_its_hosts_alone_by_vault_id() -> None:
    host = load(vaulted_group(), password("pw2", "prod")).host("gpu1")
    assert resolve_secrets(host.servers["s"]) == {"TOKEN": "sk-CANARY-in-a-file"}
    assert host.connection.user == "ops"
    assert "CANARY" not in str(host.to_json())
    locked = load(vaulted_group())
    assert locked.host("web1").connection.host == "web1"
    with pytest.raises(InventoryError, match="no vault password is given"):
        locked.host("gpu1")


@pytest.mark.parametrize("name", ["hosts.yml", "hosts", "hosts.ini"])
def test_a_vaulted_source_of_hosts_is_refused_and_not_taken_for_hosts(name: str) -> None:
    with pytest.raises(InventoryError, match=f"inventory/{name}:1: is a vault"):
        load({f"inventory/{name}": SEALED}, password())


def test_a_password_script_is_told_the_vault_id(tmp_path: Path) -> None:
    script = tmp_path / "keys-client.sh"
    script.write_text('#!/bin/sh\n[ "$1 $2" = "--vault-id prod" ] && echo pw2\n')
    script.chmod(0o755)
    environment = {"ANSIBLE_VAULT_IDENTITY_LIST": f"other@absent, prod@{script}"}
    vault = Vault(password_sources([], [], environment))
    assert resolve_secrets(load(vaulted_group(), vault).host("gpu1").servers["s"]) == {"TOKEN": "sk-CANARY-in-a-file"}


@pytest.mark.parametrize("name", ["gpu1.sops.yml", "gpu1/b.yml", "gpu1/b.sops.yaml"])
def test_a_sops_file_is_opened_by_sops_when_a_value_of_it_is_needed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = "token: 'ENC[AES256_GCM,data:x]'\nports: [{a: 'ENC[x]'}]\nplain_unencrypted: b\n"
    needs = (
        SERVER.replace("8000", "'{{ 8000 }}'") + "    secrets: {T: '{{ token }}'}\n    args: {p: '{{ ports[0].a }}'}\n"
    )
    files = {
        "inventory/hosts.yml": "all: {hosts: {gpu1: , gpu2: }}",
        "inventory/group_vars/all.yml": needs,
        f"inventory/host_vars/{name}": sealed + "sops: {version: 3, mac: 'ENC[x]'}\n",
        "inventory/host_vars/gpu2.yml": "token: !secret env:HOME\nports: [{a: 1}]\n",
    }
    monkeypatch.setenv("PATH", "/nowhere")
    assert load(files).host("gpu2").servers["s"].args["p"] == 1
    with pytest.raises(InventoryError, match="the program sops is not installed"):
        resolve_secrets(load(files).host("gpu1").servers["s"])
    sops = tmp_path / "bin" / "sops"
    sops.parent.mkdir()
    sops.write_text(
        '#!/bin/sh\n[ "$1" = --decrypt ] && [ -f "$2" ] && echo >>ran && '
        "printf 'token: sops-CANARY\\nports: [{a: 4711}]\\nplain_unencrypted: b\\n'\n"
    )
    sops.chmod(0o755)
    monkeypatch.setenv("PATH", str(sops.parent))
    host = load(files).host("gpu1")
    assert sorted(resolve_secrets(host.servers["s"]).values()) == ["4711", "sops-CANARY"]
    assert "CANARY" not in str(host.to_json()) + repr(host)
    assert "4711" not in str(host.to_json()["servers"])
    assert Path("ran").read_text() == "\n"  # once for all values of a file


# -- merging


def test_servers_merge_and_other_variables_are_replaced_as_in_ansible() -> None:
    files = {
        "inventory/hosts.yml": "all: {hosts: {gpu1: }, vars: {opts: {a: 1, b: 2}}}",
        "inventory/group_vars/all.yml": SERVER + "    env: {A: '1'}\n",
        "inventory/host_vars/gpu1.yml": "opts: {b: 3}\nservers: {s: {env: {B: '{{ opts | to_json }}'}}}\n",
    }
    env = load(files).host("gpu1").servers["s"].env
    assert {name: each.value for name, each in env.items()} == {"A": "1", "B": '{"b": 3}'}


def test_merge_replace_takes_the_last_servers_whole() -> None:
    files = {
        "inventory/hosts.yml": "all: {hosts: {gpu1: }}",
        "inventory/group_vars/all.yml": "merge: replace\n" + SERVER + "    env: {A: '1'}\n",
        "inventory/host_vars/gpu1.yml": SERVER.replace("  s:", "  t:"),
    }
    assert list(load(files).host("gpu1").servers) == ["t"]


def test_what_a_vaulted_value_holds_is_no_template() -> None:
    sealed = (CASES / "template.vault").read_text()
    host = gpu1("key: !vault |\n" + indented(sealed, 2), "    secrets: {T: '{{ key }}'}\n", password())
    assert resolve_secrets(host.servers["s"]) == {"T": "{{ 5 }}x"}
