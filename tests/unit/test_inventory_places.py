"""Sources of an inventory: INI, programs, directories of several, lists of names, and what only Ansible can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lamplighter.errors import InventoryError, UsageError
from lamplighter.inventory import Inventory, load_inventory
from lamplighter.inventory.sources import script
from lamplighter.project import PROJECT
from lamplighter.run import command


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no ansible-inventory


def load(files: Mapping[str, str], *sources: str) -> Inventory:
    for name, text in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(0o755)
    return load_inventory(sources or ("inventory",), Path("roles"))


def wrong(files: Mapping[str, str], *sources: str) -> list[str]:
    with pytest.raises(InventoryError) as caught:
        load(files, *sources)
    return str(caught.value).splitlines()


INI = """\
# nodes
lonely ansible_port=2200
[gpu]
gpu[1:2]:2222 ansible_user='a b' ntp="{'x': 1}"   # two
[big:children]
gpu
later
[gpu:vars]
ansible_become = yes   # not a comment here
ansible_ssh_common_args='-o ProxyCommand="ssh -W %h:%p -q ops@b"'
; done
[later]
10.0.0.7
"""


def test_dots_alone_are_text_in_ini() -> None:
    inventory = load({"inventory": "gpu1 a=...\n[all:vars]\nansible_user=...\n"})
    assert inventory._scopes.variables("gpu1")["a"].data == "..."
    assert inventory._scopes.variables("gpu1")["ansible_user"].data == "..."


def test_ini() -> None:
    inventory = load({"inventory/hosts": INI.replace("'a b'", "ops").replace("yes   # not a comment here", "yes")})
    assert inventory.hosts == ("lonely", "gpu1", "gpu2", "10.0.0.7")
    assert inventory.groups["big"] == ("gpu1", "gpu2", "10.0.0.7")
    gpu1 = inventory.host("gpu1")
    assert (gpu1.connection.port, gpu1.connection.user, gpu1.connection.become) == (2222, "ops", True)
    assert gpu1.connection.ssh_options == (("proxycommand", "ssh -W %h:%p -q ops@b"),)
    assert {path: str(gpu1.origins[path]) for path in ("ansible_port", "ansible_user", "become")} == {
        "ansible_port": "inventory/hosts:4",
        "ansible_user": "inventory/hosts:4",
        "become": "inventory/hosts:9",
    }
    assert inventory.host("lonely").connection.port == 2200


def test_all_mistakes_of_an_ini_file_come_together_each_with_its_line() -> None:
    text = "[gpu\ngpu1 port\n[a b]\n[gpu:hosts:x]\n[x:vars]\na=1\nnonsense\n[y:children]\nz\n: :\n[gpu:what]\nall:\n"
    assert wrong({"hosts.ini": text + "[g]\ngpu2 'x\n"}, "hosts.ini") == [
        "hosts.ini:1: [gpu: a range is [first:last] or [first:last:step]",
        "hosts.ini:2: gpu1: 'port' must be NAME=VALUE",
        "hosts.ini:3: [a b] is no section: write [group], [group:vars] or [group:children], without spaces",
        "hosts.ini:4: [gpu:hosts:x] is no section: write [group], [group:vars] or [group:children], without spaces",
        "hosts.ini:7: 'nonsense' must be NAME=VALUE below [x:vars]",
        "hosts.ini:10: ': :' is no name of a group",
        "hosts.ini:11: [gpu:what]: a section is [group], [group:vars] or [group:children]",
        "hosts.ini:14: gpu2 'x: no closing quotation",
        "hosts.ini:5: [x:vars]: there is no group x",
        "hosts.ini:9: [y:children]: there is no group z; declare it with [z]",
    ]


def test_values_of_ini_are_literals_where_they_can_be() -> None:
    text = "h a=1 b=0x1f c=yes d=None e=\"['x', 2]\" f=010 g='1.50'\n"
    scope = load({"hosts.ini": text}, "hosts.ini")._tree.hosts["h"].entries or {}
    assert [scope[name].data for name in "abcd"] == [1, 31, "yes", None]
    assert [each.data for each in scope["e"].data] == ["x", 2]  # type: ignore[union-attr]
    assert [(scope[name].data, scope[name].text) for name in "fg"] == [("010", "010"), (1.5, "1.50")]


PROGRAM = """\
#!/bin/sh
[ "$1" = --list ] || { echo '{"ansible_user": "late"}'; exit; }
echo '{"gpu": {"hosts": ["gpu1"], "vars": {"ansible_port": 2222}, "children": ["sub"]}, "sub": ["gpu2"] META}'
"""


def test_a_program() -> None:
    meta = ', "_meta": {"hostvars": {"gpu1": {"ansible_host": "10.0.0.1"}, "nobody": {"x": 1}}}'
    inventory = load({"inv.py": PROGRAM.replace("META", meta)}, "inv.py")
    assert inventory.groups == {"all": ("gpu1", "gpu2"), "ungrouped": (), "gpu": ("gpu1", "gpu2"), "sub": ("gpu2",)}
    found = inventory.host("gpu1")
    assert (found.connection.host, found.connection.port) == ("10.0.0.1", 2222)
    assert str(found.origins["ansible_host"]) == "inv.py --list"
    without_meta = load({"inv.py": PROGRAM.replace("META", "")}, "inv.py").host("gpu2")
    assert (without_meta.connection.user, str(without_meta.origins["ansible_user"])) == ("late", "inv.py --host gpu2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#!/bin/sh\necho no cloud today >&2; exit 3\n", "inv --list: ended with 3: no cloud today"),
        ("#!/bin/sh\necho hello\n", "inv --list: did not print JSON: Expecting value"),
        ("#!/bin/sh\necho '[]'\n", "inv --list: must print a mapping of groups by name"),
        ("#!/nowhere/python\n", "inv --list: cannot be started: No such file"),
        ("""#!/bin/sh\necho '{"g": {"hosts": "gpu1"}}'\n""", "inv --list: g.hosts: must be a list of names"),
        ("""#!/bin/sh\necho '{"g": {"vars": 1}}'\n""", "inv --list: g.vars: must be a mapping of variables"),
        ("""#!/bin/sh\necho '{"g": ["a\\u001b[1m"]}'\n""", "inv --list: 'a\\x1b[1m' is no name for a host"),
    ],
)
def test_a_program_that_fails(text: str, expected: str) -> None:
    assert wrong({"inv": text}, "inv")[0].startswith(expected)


def test_a_script_whose_interpreter_is_not_there_names_it() -> None:
    assert wrong({"inv": "#!/no/python\n"}, "inv") == [
        "inv --list: cannot be started: No such file or directory (its first line is '#!/no/python')"
    ]


@pytest.mark.parametrize("stream", ["", ">&2"])
def test_a_program_that_prints_without_end_is_ended(stream: str) -> None:
    assert wrong({"inv": f"#!/bin/sh\nexec yes 01234567890123456789012345678901 {stream}\n"}, "inv") == [
        "inv --list: printed more than 64 MiB, and was ended"
    ]


def test_a_program_that_fails_for_one_host_is_not_asked_for_the_others() -> None:
    text = '#!/bin/sh\necho "$2" >>asked\n[ "$1" = --list ] && echo \'{"g": ["a", "b"]}\'\n'
    assert wrong({"inv": text}, "inv") == ["inv --host a: ended with 1"]
    assert Path("asked").read_text() == "\na\n"


def test_a_program_that_hangs_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PATIENCE", 0.3)
    assert wrong({"inv": "#!/bin/sh\nsleep 1000 & sleep 1000\n"}, "inv") == [
        "inv --list: printed no inventory within 0.3 s, and was ended"
    ]


def test_a_directory_of_several() -> None:
    inventory = load(
        {
            "inventory/10.yml": "gpu: {hosts: {gpu1: {ansible_user: a}}}\n",
            "inventory/20": "[gpu]\ngpu2\ngpu1 ansible_user=b\n",
            "inventory/deep/30.json": '{"gpu": {"hosts": {"gpu3": null}}}',
            "inventory/40.sh": '#!/bin/sh\necho \'{"gpu": ["gpu4"]}\'\n',
            "inventory/checks/test_x.py": "import os\n",
            "inventory/hosts.yml.orig": "broken: [",
            "inventory/README.md": "# hosts",
            "inventory/.hidden": "[",
            "inventory/site.yml": "- hosts: gpu\n  roles: []\n",
        }
    )
    assert inventory.groups["gpu"] == ("gpu1", "gpu2", "gpu4", "gpu3")
    assert inventory.host("gpu1").connection.user == "b"
    assert [str(each) for each in inventory.warnings] == [
        "inventory: not read: hosts.yml.orig (in a directory, names that end so are passed over)",
        "inventory/site.yml:1: not read as an inventory: the file must hold a mapping of groups, not a list",
    ]


def test_what_else_lies_in_a_directory_is_told_and_stops_nobody() -> None:
    inventory = load(
        {
            "inventory/hosts.ini": "[gpu]\ngpu1\n",
            "inventory/main.tf": 'terraform {\n  version = "1"\n}\n',
            "inventory/artifacts/admin.conf": "apiVersion: v1\nkind: Config\n",
            "inventory/Makefile": "all:\n\tansible-playbook x\n",
            "inventory/of_ansible.lab": "[gpu]\ngpu2\n",
        }
    )
    assert inventory.groups["gpu"] == ("gpu1", "gpu2")
    assert [str(each) for each in inventory.warnings] == [
        f"inventory/{name}: not read as an inventory: neither its name nor its text is that of one"
        for name in ("Makefile", "artifacts/admin.conf", "main.tf")
    ]
    assert "main.tf:1: terraform: " in wrong({}, "inventory/main.tf")[0]
    assert "hosts:1: gpu1: " in wrong({"inventory/hosts": "gpu1 x\n"})[0]


@pytest.mark.parametrize("name", ["hosts.yml", "hosts.yaml", "hosts.json"])
@pytest.mark.parametrize("text", ["[gpu]\ngpu1 a=1\ngpu2\n", "# c\ngpu1 ansible_user=u\n[gpu]\ngpu[1:2]\n"])
def test_ini_in_a_file_of_another_suffix_is_ini(name: str, text: str) -> None:
    assert load({f"inventory/{name}": text}).groups["gpu"] == ("gpu1", "gpu2")


def test_a_mistake_is_told_in_the_words_of_what_was_meant() -> None:
    assert "hosts.yml:2: YAML does not allow a tab" in wrong({"inventory/hosts.yml": "all:\n\thosts:\n"})[0]
    assert "hosts.yml:2: gpu1: 'x' must be NAME=VALUE" in wrong({"inventory/hosts.yml": "[gpu]\ngpu1 x\n"})[0]


def test_a_directory_of_nothing_but_passed_over_names_says_which() -> None:
    assert wrong({"inventory/inventory.cfg": "gpu1\n"}) == [
        "inventory: not read: inventory.cfg (in a directory, names that end so are passed over)"
    ]


def test_several_sources_each_with_its_variables() -> None:
    inventory = load(
        {
            "a/hosts.yml": "gpu: {hosts: {gpu1: }}\n",
            "a/group_vars/gpu.yml": "ansible_user: a\nansible_port: 1\n",
            "b/hosts.ini": "[gpu]\ngpu2\n",
            "b/group_vars/all.yml": "ansible_user: all\n",
            "b/group_vars/gpu.yml": "ansible_user: b\n",
        },
        "a",
        "b/hosts.ini",
        "gpu3:2022,10.0.0.9,",
    )
    assert inventory.hosts == ("gpu1", "gpu2", "gpu3", "10.0.0.9")
    assert inventory.groups["ungrouped"] == ("gpu3", "10.0.0.9")
    assert (inventory.host("gpu1").connection.user, inventory.host("gpu1").connection.port) == ("b", 1)
    assert (inventory.host("gpu3").connection.user, inventory.host("gpu3").connection.port) == ("all", 2022)


def test_what_only_ansible_reads_is_told_where_it_is_not_installed() -> None:
    plugin = "plugin: amazon.aws.aws_ec2\n"
    said = (
        "this is the configuration of a plugin, which only ansible-inventory can read, and that is not installed here"
    )
    assert wrong({"aws_ec2.yml": plugin}, "aws_ec2.yml") == [f"aws_ec2.yml:1: {said}"]
    assert "a TOML inventory" in wrong({"hosts.toml": "x"}, "hosts.toml")[0]
    inventory = load({"inventory/aws_ec2.yml": plugin, "inventory/hosts": "gpu1\n"})
    assert inventory.hosts == ("gpu1",)
    assert [str(each) for each in inventory.warnings] == [
        f"inventory/aws_ec2.yml:1: not read: inventory/aws_ec2.yml:1: {said}"
    ]


def test_what_only_ansible_reads_comes_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        '{"_meta": {"hostvars": {"gpu1": {"a": 1, "ansible_user": "new"}, "gpu9": {}}}, "cloud": {"hosts": ["gpu9"]}}'
    )
    load(
        {
            "bin/ansible-inventory": f"#!/bin/sh\necho \"$@\" >>{tmp_path}/asked\necho '{said}'\n",
            "inventory/0": "gpu1 a=1\n",
        }
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    inventory = load({"inventory/aws_ec2.yml": "plugin: amazon.aws.aws_ec2\n"})
    assert (tmp_path / "asked").read_text() == "-i inventory/0 -i inventory/aws_ec2.yml --list --export\n"
    assert inventory.groups["cloud"] == ("gpu9",)
    found = inventory.host("gpu1")
    assert str(found.origins["ansible_user"]) == "ansible-inventory --list of inventory/aws_ec2.yml"
    assert str((inventory._tree.hosts["gpu1"].entries or {})["a"].origin) == "inventory/0:1"


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ("inventory", "", [str(PROJECT / "inventory")]),
        ("other", "", [str(PROJECT / "other")]),
        ("~/other", "", ["~/other"]),
        (["a", "/b", "gpu1,"], "", [str(PROJECT / "a"), "/b", "gpu1,"]),
        ("inventory", "a,b", ["a", "b"]),
        ("inventory", " a , ", ["a"]),
        ("inventory", ",", [str(PROJECT / "inventory")]),
        (("x", "gpu1,gpu2"), "a", ["x", "gpu1,gpu2"]),
    ],
)
def test_where_the_inventory_is(given: str | Sequence[str], environment: str, expected: list[str]) -> None:
    assert list(command._sources(given, environment)) == expected


def test_sources_with_a_comma_that_are_files_are_refused() -> None:
    Path("a.yml").touch()
    with pytest.raises(UsageError, match="a comma lists names of hosts"):
        command._sources(("a.yml,b.yml",), "")
    with pytest.raises(UsageError, match="--inventory is empty"):
        command._sources((" ",), "")
