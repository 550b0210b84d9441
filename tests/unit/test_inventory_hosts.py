"""Groups, precedence, files beside hosts.yml and host patterns, each error with its file:line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lamplighter.errors import InventoryError, UsageError
from lamplighter.inventory import Inventory, Origin, load_inventory
from lamplighter.inventory.groups import expand_range
from lamplighter.inventory.patterns import split_pattern

Files = Mapping[str, str]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(files: Files, path: str = "inventory") -> Inventory:
    for name, text in {"roles/demo/engine.yml": "", **files}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    return load_inventory(Path(path), Path("roles"))


def hosts(text: str) -> Inventory:
    return load({"inventory/hosts.yml": text})


def load_error(files: Files, path: str = "inventory") -> str:
    with pytest.raises(InventoryError) as caught:
        load(files, path)
    assert caught.value.exit_code == 2
    return str(caught.value)


FLEET = """\
all:
  children:
    dgx:
      children:
        east:
          hosts:
            gpu[1:3]:
        west:
          hosts:
            gpu[4:5]:
    spare:
      hosts:
        gpu5:
        gpu6:
  hosts:
    lonely:
"""


# ---- Patterns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("all", "lonely gpu5 gpu6 gpu1 gpu2 gpu3 gpu4"),
        ("*", "lonely gpu5 gpu6 gpu1 gpu2 gpu3 gpu4"),
        ("ungrouped", "lonely"),
        ("gpu2", "gpu2"),
        ("dgx", "gpu1 gpu2 gpu3 gpu4 gpu5"),
        ("gpu6:gpu1", "gpu6 gpu1"),
        ("gpu6,gpu1,gpu6", "gpu6 gpu1"),
        (" gpu6 , gpu1 ", "gpu6 gpu1"),
        ("dgx:&spare", "gpu5"),
        ("dgx:!west", "gpu1 gpu2 gpu3"),
        ("!dgx", "lonely gpu6"),
        ("!west:dgx:&gpu[0]*", None),
        ("!gpu1,dgx,&east", "gpu2 gpu3"),
        ("gpu*:!gpu[2-5]*", "gpu1 gpu6"),
        ("gpu?", "gpu1 gpu2 gpu3 gpu4 gpu5 gpu6"),
        ("w*", "gpu4 gpu5"),
        ("~gpu[12]", "gpu1 gpu2"),
        ("~(east|west)", "gpu1 gpu2 gpu3 gpu4 gpu5"),
        ("~gpu(1|2):gpu4", "gpu1 gpu2 gpu4"),
        ("~gpu\\d$:!dgx", "gpu6"),
        ("dgx[0]", "gpu1"),
        ("dgx[-1]", "gpu5"),
        ("dgx[1:2]", "gpu2 gpu3"),
        ("dgx[3:]", "gpu4 gpu5"),
        ("dgx[0-1]", "gpu1 gpu2"),
        ("all[-1]", "gpu4"),
        ("all[0]", "lonely"),
        ("gpu*[1]", "gpu2"),
        ("*st[0:1]", "gpu1 gpu2"),
        ("dgx[7:9]", None),
        ("zzz*", None),
        ("dgx:!all", None),
    ],
)
def test_patterns(pattern: str, expected: str | None) -> None:
    inventory = hosts(FLEET)
    if expected is not None:
        assert inventory.select([pattern]) == expected.split()
        return
    with pytest.raises(UsageError, match="no host fits") as caught:
        inventory.select([pattern])
    assert "the inventory has gpu1, gpu2" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("dgx[9]", "dgx[9]: there is no such host: dgx has 5, counted from 0"),
        ("dgx[9]:lonely", "dgx[9]: there is no such host"),
        ("w*[-3]", "w*[-3]: there is no such host: w* has 2"),
        ("dgx:!west,lonely", "no host or group 'dgx:!west' in the inventory"),
        ("~gpu\\d{1,2}", "no host or group '2}'"),
        ("~gpu(?:1|2)", "~gpu(? is no regular expression"),
        ("gpu[1", "gpu[1: a bracket has no other half"),
        ("gpu1:2222", "no host or group 'gpu1:2222'"),
    ],
)
def test_what_a_pattern_may_not_be(pattern: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        hosts(FLEET).select([pattern])
    assert str(caught.value).startswith(said)


def test_hosts_come_in_the_order_of_their_group() -> None:
    inventory = hosts(
        "all: {children: {b: {hosts: {g2: , g1: }}, a: {hosts: {g3: , g1: }}, big: {children: {a: , b: }}}}"
    )
    assert inventory.select(["b"]) == ["g2", "g1"]
    assert inventory.select(["a:b"]) == ["g3", "g1", "g2"]
    assert inventory.select(["big"]) == ["g3", "g1", "g2"]
    assert inventory.select(["big[1]"]) == ["g1"]
    assert inventory.select(["b[0],a[0]"]) == ["g2", "g3"]


def test_patterns_may_stand_in_a_file(tmp_path: Path) -> None:
    inventory = hosts(FLEET)
    Path("some").write_text("# tonight\nwest\n\n!gpu5, lonely\n", encoding="utf-8")
    assert inventory.select(["@some"]) == ["gpu4", "lonely"]
    assert inventory.select(["gpu1", "@some"]) == ["gpu1", "gpu4", "lonely"]
    Path("fifo").unlink(missing_ok=True)
    os.mkfifo("fifo")
    for name, what in {
        "absent": "there is no such file",
        "fifo": "that is no reg",
        str(tmp_path): "that is no reg",
    }.items():
        with pytest.raises(UsageError, match=f"^@{name}: {what}"):
            inventory.select([f"@{name}"])
    Path("empty").touch()
    with pytest.raises(UsageError, match="no host was named"):
        inventory.select(["@empty"])


def test_a_host_among_the_children_is_told_where_it_belongs() -> None:
    text = "all:\n  hosts: {gpu9: }\n  children:\n    gpu:\n      children:\n        gpu1:\n"
    with pytest.raises(
        UsageError, match=r"gpu1 is a group without hosts \(inventory/hosts.yml:6\): a host stands under `h"
    ):
        hosts(text).select(["gpu1"])
    assert "inventory/hosts.yml:4: gpu1.ansible_host: gpu1 stands under `children` of all" in load_error(
        {"inventory/hosts.yml": "all:\n  children:\n    gpu1:\n      ansible_host: 1.2.3.4\n"}
    )


def test_repeated_patterns_count_as_one() -> None:
    assert hosts(FLEET).select(["dgx", "!east", "lonely"]) == ["gpu4", "gpu5", "lonely"]


@pytest.mark.parametrize("pattern", ["gup1", "gpu1,gup2", "all:!gup1", "all:&gup1", "gup[0]"])
def test_an_unknown_name_is_an_error_wherever_it_stands(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"no host or group 'gup\d?' in the inventory") as caught:
        hosts(FLEET).select([pattern])
    assert caught.value.exit_code == 2


def test_an_unknown_name_comes_with_the_closest_known_one() -> None:
    with pytest.raises(UsageError, match=r"'gpul' in the inventory \(did you mean gpu\d\?\)"):
        hosts(FLEET).select(["gpul"])


def test_a_name_that_is_far_from_all_known_ones_comes_without_one() -> None:
    with pytest.raises(UsageError, match="no host or group 'nope'") as caught:
        hosts(FLEET).select(["nope"])
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("patterns", [[], [""], [" , "], ["!"], ["&:,"]])
def test_no_pattern_is_refused(patterns: list[str]) -> None:
    with pytest.raises(UsageError, match="no host was named"):
        hosts(FLEET).select(patterns)


def test_a_broken_expression_is_refused() -> None:
    with pytest.raises(UsageError, match=r"~gpu\( is no regular expression"):
        hosts(FLEET).select(["~gpu("])


NAMES = st.sampled_from(["all", "dgx", "east", "west", "spare", "ungrouped", "gpu1", "gpu4", "gpu6", "lonely", "gpu*"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    directory = tmp_path_factory.mktemp("fleet")
    (directory / "hosts.yml").write_text(FLEET, encoding="utf-8")
    return load_inventory(directory, directory / "roles")


@given(st.lists(NAMES, min_size=1, max_size=3), st.lists(NAMES, max_size=2), st.lists(NAMES, max_size=2), st.randoms())
def test_a_pattern_is_union_then_intersection_then_difference(
    fleet: Inventory, union: list[str], both: list[str], never: list[str], order: object
) -> None:
    def members(name: str) -> set[str]:
        return set(fleet.hosts) - {"lonely"} if name == "gpu*" else set(fleet.groups.get(name, (name,)))

    expected = set().union(*map(members, union))
    for name in both:
        expected &= members(name)
    for name in never:
        expected -= members(name)
    pieces = [*union, *(f"&{name}" for name in both), *(f"!{name}" for name in never)]
    order.shuffle(pieces)  # type: ignore[attr-defined]
    try:
        found = fleet.select([":".join(pieces)])
    except UsageError:
        found = []
    assert set(found) == expected
    assert len(found) == len(set(found))


@given(st.text(alphabet="ab:,[]{}()\\!& ~*", max_size=20))
def test_splitting_loses_nothing_but_separators_and_blanks(pattern: str) -> None:
    def essence(text: str) -> str:
        return re.sub(r"[:,!& ]", "", text)

    try:
        pieces = split_pattern(pattern)
    except UsageError:  # what would be lost is refused
        assert re.search(r"[\[\]]", pattern)
    else:
        assert essence("".join(pieces)).replace(",", "") == essence(pattern).replace(",", "")


# ---- hosts.yml -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("gpu", "gpu"),
        ("gpu[1:3]", "gpu1 gpu2 gpu3"),
        ("gpu[08:10]", "gpu08 gpu09 gpu10"),
        ("gpu[1:9:4].x", "gpu1.x gpu5.x gpu9.x"),
        ("r[a:c]", "ra rb rc"),
        ("r[a:b]g[1:2]", "rag1 rag2 rbg1 rbg2"),
        ("gpu[9:11]", "gpu9 gpu10 gpu11"),
        ("gpu[:2]", "gpu0 gpu1 gpu2"),
        ("gpu[y:B]", "gpuy gpuz gpuA gpuB"),
    ],
)
def test_ranges(written: str, expected: str) -> None:
    assert expand_range(written) == expected.split()


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("gpu[3:1]", "the range is empty"),
        ("gpu[1]", "a range is [first:last]"),
        ("gpu[1:b]", "two numbers or two letters"),
        ("gpu[1:5:0]", "the step of a range"),
        ("gpu[01:100]", "the same number of digits"),
        ("gpu[1:9999999999]", "more than 100000 hosts"),
        ("g[1:999]-[1:999]", "more than 100000 hosts"),
    ],
)
def test_wrong_ranges(written: str, message: str) -> None:
    assert message in load_error({"inventory/hosts.yml": f"all:\n  hosts:\n    {written}:\n"})
    assert load_error({"inventory/hosts.yml": f"all:\n  hosts:\n    {written}:\n"}).startswith(
        "inventory/hosts.yml:3: "
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hosts:\n  gpu1:\n", ":1: `hosts` must stand below a group: write `all:` above it"),
        (
            "all:\n  host:\n    gpu1:\n",
            ":2: all.host: a group has hosts, children and vars alone (did you mean hosts?)",
        ),
        ("all:\n  hosts: [gpu1]\n", ":2: all.hosts: must be a mapping, not a list"),
        ("all:\n  hosts:\n    gpu1: 5\n", ":3: gpu1: must be a mapping, not the number 5"),
        ("all:\n  children: [gpu]\n", ":2: all.children: must be a mapping, not a list"),
        ('all:\n  hosts:\n    "a\\nb":\n', ":3: 'a\\nb' is no name for a host: it holds invisible characters"),
        ("all:\n  hosts:\n    all:\n", ":3: all is the name of a group"),
        ('"a\\e[1m":\n', ":1: 'a\\x1b[1m' is no name for a group"),
        ("g:\n  children:\n    all:\n", ":3: all cannot be a child of g"),
        ("a:\n  children:\n    b:\nb:\n  children:\n    a:\n", ":6: groups in a circle: a > b > a"),
        ("a:\n  children:\n    a:\n", ":3: groups in a circle: a > a"),
        ("a:\n  vars:\n    ansible_group_priority: high\n", ":3: ansible_group_priority: must be a number"),
    ],
)
def test_a_wrong_hosts_file(text: str, expected: str) -> None:
    assert f"inventory/hosts.yml{expected}" in load_error({"inventory/hosts.yml": text})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all: {hosts: {h: }}\nx: gpu1\n", ":2: x: not read: a group is a mapping of hosts, children and vars"),
        ("all: {hosts: {h: }}\nx-common: &c {ansible_user: ops}\n", ":2: x-common.ansible_user: not read: a group has"),
        ("all: {hosts: {h: }}\nx:\n  hosts:\n  h:\n    a: 1\n", ":4: x.h: not read: a group has hosts, children and"),
        ("x:\n  hosts:\n    a:\na:\n  hosts:\n    b:\n", ":3: a is a group and a host"),
        ("_meta: {hostvars: {h: {a: 1}}}\nall: {hosts: {h: }}\n", ":1: _meta.hostvars: not read: a group has hosts"),
        ("all: {children: {x: {hosts: {h: }, ansible_user: u}}}\n", ":1: x.ansible_user: not read: a group has hosts"),
    ],
)
def test_what_ansible_passes_over_is_told(text: str, expected: str) -> None:
    (found,) = hosts(text).warnings
    assert str(found).startswith(f"inventory/hosts.yml{expected}")


def test_text_at_the_top_is_no_group_and_a_group_may_be_called_hosts() -> None:
    inventory = hosts("x: gpu1\nn: 5\nnull_one:\nhosts: {hosts: {h: }, vars: {ansible_user: u}}\n")
    assert set(inventory.groups) == {"all", "ungrouped", "null_one", "hosts"}
    assert inventory.groups["hosts"] == ("h",)
    assert inventory.host("h").connection.user == "u"


def test_an_inventory_without_hosts_says_so_whatever_else_looks_wrong() -> None:
    assert load_error({"inventory/hosts.yml": "all: {vars: {a: 1, a: 2}}\n"}) == (
        "inventory/hosts.yml: the inventory has no hosts"
    )


def test_one_run_tells_of_a_broken_file_and_of_what_is_wrong_beside_it() -> None:
    text = "servers: {s: {engine: demo, port: 8000, modle: x}, t: {engine: demo, model: m, port: 99999}}\n"
    files = {"inventory/hosts.yml": "all: {hosts: {h: }}\n", "inventory/host_vars/h.yml": text}
    with pytest.raises(InventoryError) as caught:
        load({**files, "inventory/group_vars/all.yml": "a: [b\n"}).host("h")
    found = str(caught.value).splitlines()
    assert [each.partition(": ")[0] for each in found] == [
        "inventory/group_vars/all.yml:2",
        "inventory/host_vars/h.yml:1",
        "inventory/host_vars/h.yml:1",
    ]
    assert "servers.s.modle: unknown name" in found[1]  # its model may well stand in the broken file
    assert "servers.t.port: " in found[2]


def test_what_may_stand_in_a_file_that_cannot_be_read_is_not_called_undefined() -> None:
    text = "servers: {s: {engine: demo, model: '{{ m }}', port: '{{ 1 / 0 }}'}}\n"
    files = {"inventory/hosts.yml": "all: {hosts: {h: }}\n", "inventory/host_vars/h.yml": text}
    with pytest.raises(InventoryError) as caught:
        load({**files, "inventory/group_vars/all.yml": "m: [b\n"}).host("h")
    first, second = str(caught.value).splitlines()
    assert first.startswith("inventory/group_vars/all.yml:2: not YAML")
    assert "servers.s.port: the template failed" in second
    with pytest.raises(InventoryError, match="'m' is undefined"):
        load({**files, "inventory/group_vars/all.yml": "n: b\n"}).host("h")


def test_a_chain_of_many_groups_is_no_matter() -> None:
    text = "".join(f"g{n}: {{children: {{g{n + 1}: }}}}\n" for n in range(1200)) + "g1200: {hosts: {h: }}\n"
    inventory = hosts(text)
    assert inventory.select(["g0"]) == ["h"]
    assert inventory.host("h").groups[:2] == ("all", "g0")
    circle = text + "x: {children: {g7: }}\n" + "g1200: {children: {g5: }}\n".replace("g1200", "g1199")
    assert "groups in a circle: g5 > g6" in load_error({"inventory/hosts.yml": circle})


def test_groups_outer_first_then_priority_then_alphabet() -> None:
    inventory = hosts(
        "b: {hosts: {h: }}\na: {hosts: {h: }, vars: {ansible_group_priority: 5}}\n"
        "z: {children: {b: }}\nc: {hosts: {h: }}\n"
    )
    assert inventory.host("h").groups == ("all", "c", "z", "a", "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ":1: the inventory is empty: it has no hosts"),
        ("---\n", ":1: the inventory is empty: it has no hosts"),
        ("# todo\n", ":1: the inventory is empty: it has no hosts"),
        ("all:\n", ": the inventory has no hosts"),
        ("all:\n  children:\n    gpu:\n      children:\n        gpu1:\n", ":5: gpu1 is a group without hosts: a host"),
        ("all:\n  hosts:\n  gpu1:\n    x: 1\n", ":3: all.gpu1: not read: a group has hosts, children and vars alone"),
        ("ansible_user: ops\n", ":1: ansible_user: not read: a group is a mapping of hosts, children and vars"),
    ],
)
def test_an_inventory_without_hosts_says_where_they_may_have_been_meant(text: str, expected: str) -> None:
    assert load_error({"inventory/hosts.yml": text}).startswith(f"inventory/hosts.yml{expected}")


def test_an_unknown_host_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"no host 'gpu9' in the inventory \(did you mean gpu"):
        hosts(FLEET).host("gpu9")


# ---- Files beside it -----------------------------------------------------------------------------------------------


def test_where_the_inventory_is_not(tmp_path: Path) -> None:
    assert load_error({}, "nowhere").startswith("nowhere: there is no inventory here")
    (tmp_path / "empty").mkdir()
    assert load_error({}, "empty").startswith("empty: there is no inventory in this directory: write hosts.yml")
    os.mkfifo(tmp_path / "fifo")
    assert load_error({}, "fifo").startswith("fifo: is no regular file")
    (tmp_path / "there").mkdir()
    os.symlink("/dev/zero", tmp_path / "there" / "hosts.yml")
    assert load_error({}, "there").startswith("there/hosts.yml: is no regular file")


def test_one_file_as_inventory_has_its_variables_beside_it() -> None:
    files = {"x/prod.yml": "all:\n  hosts:\n    gpu1:\n", "x/host_vars/gpu1.yml": "root: /a\n"}
    assert load(files, "x/prod.yml").host("gpu1").root == "/a"


@pytest.mark.parametrize("name", ["gpu1.yml", "gpu1.yaml", "gpu1.json", "gpu1", "gpu1/any.yml", "gpu1/deep/any.yaml"])
def test_forms_of_a_variable_file(name: str) -> None:
    host = load({"inventory/hosts.yml": "all: {hosts: {gpu1: }}", f"inventory/host_vars/{name}": "root: /a\n"}).host(
        "gpu1"
    )
    assert host.root == "/a"
    assert str(host.origins["root"]) == f"inventory/host_vars/{name}:1"


def test_a_directory_merges_by_alphabet_and_skips_leftovers() -> None:
    host = load(
        {
            "inventory/hosts.yml": "all: {hosts: {gpu1.example.net: }}",
            "inventory/group_vars/README.md": "not YAML: at: all",
            "inventory/host_vars/gpu1.example.net/10.yml": "root: /ten\nansible_user: ten\n",
            "inventory/host_vars/gpu1.example.net/20.yml": "root: /twenty\n",
            "inventory/host_vars/gpu1.example.net/30.yml~": "root: /thirty\n",
            "inventory/host_vars/gpu1.example.net/.40.yml": "root: /forty\n",
            "inventory/host_vars/gpu1.example.net/notes.txt": "root: /fifty\n",
        }
    ).host("gpu1.example.net")
    assert (host.root, host.connection.user) == ("/twenty", "ten")


@pytest.mark.parametrize("file", ["group_vars/web.yml", "host_vars/localhost.yml", "host_vars/gpu11/x.yml"])
def test_a_file_for_an_absent_name_is_no_matter(file: str) -> None:
    inventory = load({"inventory/hosts.yml": FLEET, f"inventory/{file}": "root: /a\n"})
    assert (inventory.warnings, inventory.host("gpu1").root) == ((), None)


@pytest.mark.parametrize(
    ("files", "read", "unread"),
    [
        (("group_vars/dgx.yml", "group_vars/dgx/a.yml"), "group_vars/dgx/a.yml", "group_vars: not read: dgx.yml"),
        (("host_vars/gpu1.yaml", "host_vars/gpu1.yml"), "host_vars/gpu1.yml", "host_vars: not read: gpu1.yaml"),
        (("host_vars/gpu1.json", "host_vars/gpu1"), "host_vars/gpu1", "host_vars: not read: gpu1.json"),
        (("host_vars/gpu1.bak",), None, "host_vars: not read: gpu1.bak"),
        (("host_vars/gpu1.yml~",), None, "host_vars: not read: gpu1.yml~"),
        (("group_vars/dgx.disabled", "group_vars/all.j2"), None, "group_vars: not read: all.j2, dgx.disabled"),
        (("group_vars/dgx.md", "group_vars/README.md", "group_vars/.dgx.yml"), None, "group_vars: not read: dgx.md"),
    ],
)
def test_one_place_of_a_name_is_read_and_what_else_lies_there_is_told(
    files: tuple[str, ...], read: str | None, unread: str
) -> None:
    inventory = load({"inventory/hosts.yml": FLEET, **{f"inventory/{each}": f"root: /{each}\n" for each in files}})
    assert inventory.host("gpu1").root == (f"/{read}" if read else None)
    (found,) = inventory.warnings
    assert str(found).startswith(f"inventory/{unread} (what is read is the first that is there of NAME, NAME.yml")


def test_directories_of_variables_may_be_links_even_to_themselves(tmp_path: Path) -> None:
    (tmp_path / "shared" / "deep").mkdir(parents=True)
    (tmp_path / "shared" / "deep" / "x.yml").write_text("root: /linked\n", encoding="utf-8")
    (tmp_path / "shared" / "again").symlink_to(tmp_path / "shared")
    (tmp_path / "inventory" / "group_vars").mkdir(parents=True)
    (tmp_path / "inventory" / "group_vars" / "all").symlink_to(tmp_path / "shared")
    assert hosts(FLEET).host("gpu1").root == "/linked"


def test_the_mistakes_of_all_files_come_together() -> None:
    message = load_error(
        {
            "inventory/hosts.yml": "all:\n  hosts:\n    gpu1:\n    gpu[9:2]:\n",
            "inventory/group_vars/all.yml": "root: [\n",
            "inventory/host_vars/gpu1.yml": "servers: {a: 1,\n  a: 2}\n",
            "roles/demo/defaults.yml": "\tx: 1\n",
        }
    )
    assert re.findall(r"^(\S+:\d+): ", message, re.MULTILINE) == [
        "inventory/hosts.yml:4",
        "inventory/group_vars/all.yml:2",
        "inventory/host_vars/gpu1.yml:2",
        "roles/demo/defaults.yml:1",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_directory_is_an_inventory_error(tmp_path: Path) -> None:
    load({"inventory/hosts.yml": "", "inventory/group_vars/all.yml": ""})
    (tmp_path / "inventory" / "group_vars").chmod(0)
    try:
        assert "inventory/group_vars: cannot be read: Permission denied" in load_error({})
    finally:
        (tmp_path / "inventory" / "group_vars").chmod(0o700)


# ---- Precedence ----------------------------------------------------------------------------------------------------

# Lowest first: a file and the text around one variable in it.
LEVELS = (
    ("roles/node/defaults.yml", "{}"),
    ("inventory/hosts.yml", "all.vars"),
    ("inventory/hosts.yml", "all.children.outer.vars"),
    ("inventory/hosts.yml", "all.children.outer.children.inner.vars"),
    ("inventory/group_vars/all.yml", "{}"),
    ("inventory/group_vars/outer.yml", "{}"),
    ("inventory/group_vars/inner.yml", "{}"),
    ("inventory/hosts.yml", "all.children.outer.children.inner.hosts.gpu1"),
    ("inventory/host_vars/gpu1.yml", "{}"),
)


def write_levels(chosen: Mapping[int, dict[str, object]]) -> dict[str, str]:
    trees: dict[str, dict[str, object]] = {
        "inventory/hosts.yml": {
            "all": {
                "vars": {},
                "children": {"outer": {"vars": {}, "children": {"inner": {"vars": {}, "hosts": {"gpu1": {}}}}}},
            }
        }
    }
    for level, variables in chosen.items():
        file, where = LEVELS[level]
        place = trees.setdefault(file, {})
        for step in where.split(".") if where != "{}" else ():
            place = place[step]  # type: ignore[assignment]
        place.update(variables)
    # Each variable on its own line: the line in an origin can be looked up.
    return {file: yaml.safe_dump(tree, default_flow_style=False) for file, tree in trees.items()}


def said(name: str, level: int) -> str:
    return f"{'/' if name == 'root' else ''}{name}-from-level-{level}."


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, len(LEVELS) - 1),
        st.dictionaries(st.sampled_from(["root", "lab", "ansible_user", "ansible_host"]), st.just(""), min_size=1),
        min_size=1,
    )
)
def test_the_highest_level_wins_and_is_named(
    tmp_path_factory: pytest.TempPathFactory, chosen: dict[int, dict[str, str]]
) -> None:
    directory = tmp_path_factory.mktemp("levels")
    filled = {level: {name: said(name, level) for name in variables} for level, variables in chosen.items()}
    for file, text in write_levels(filled).items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text(text, encoding="utf-8")
    host = load_inventory(directory / "inventory", directory / "roles").host("gpu1")
    found = {
        "root": host.root,
        "lab": host.lab,
        "ansible_user": host.connection.user,
        "ansible_host": host.connection.host if "ansible_host" in host.origins else None,
    }
    for name, value in found.items():
        levels = [level for level in filled if name in filled[level]]
        if not levels:
            assert value is None
            continue
        assert value == said(name, max(levels))
        origin = host.origins[name]
        line = Path(origin.file).read_text(encoding="utf-8").splitlines()[origin.line - 1]
        assert line.strip() == f"{name}: {value}"
        assert Path(origin.file) == directory / LEVELS[max(levels)][0]


def test_priority_beats_the_alphabet_but_not_depth() -> None:
    text = """\
all:
  children:
    early: {vars: {ansible_group_priority: 9, root: /early}, hosts: {h: }}
    late: {vars: {root: /late, lab: late}, hosts: {h: }}
    outer: {vars: {ansible_group_priority: 99, lab: outer}, children: {zero: {hosts: {h: }, vars: {lab: zero}}}}
"""
    host = hosts(text).host("h")
    assert (host.root, host.lab) == ("/early", "zero")


def test_become_under_both_names_is_one_variable() -> None:
    files = {
        "inventory/hosts.yml": "all: {hosts: {gpu1: }, vars: {become: false}}",
        "inventory/group_vars/all.yml": "ansible_become: yes\n",
    }
    host = load(files).host("gpu1")
    assert host.connection.become is True
    assert host.origins["become"] == Origin("inventory/group_vars/all.yml", 1)
    files["inventory/group_vars/all.yml"] = "ansible_become: yes\nbecome: no\n"
    with pytest.raises(InventoryError, match=r"inventory/group_vars/all\.yml:1: ansible_become: stands beside become"):
        load(files).host("gpu1")


SERVER = "servers:\n  s:\n    engine: demo\n    model: m\n    port: 8000\n"


def test_defaults_of_the_node_and_the_engine_lie_below_a_server() -> None:
    host = load(
        {
            "inventory/hosts.yml": "all: {hosts: {gpu1: }}",
            "inventory/host_vars/gpu1.yml": SERVER + "    args: {b: 3}\n    timeouts: {free: null}\n",
            "roles/node/defaults.yml": "connect_timeout: 4\nserver:\n  python: x\n  keep_releases: 2\n  args: {a: 1}\n",
            "roles/demo/defaults.yml": "python: /opt/python\nargs:\n  a: 2\n  b: 2\ntimeouts: {free: 7, stop: 8}\n",
        }
    ).host("gpu1")
    server = host.servers["s"]
    assert (server.python, server.keep_releases, server.args) == ("/opt/python", 2, {"a": 2, "b": 3})
    assert (server.timeouts.free, server.timeouts.stop, host.connection.connect_timeout) == (120, 8, 4)
    assert {
        path: str(host.origins[path]) for path in ("servers.s.python", "servers.s.keep_releases", "connect_timeout")
    } == {
        "servers.s.python": "roles/demo/defaults.yml:1",
        "servers.s.keep_releases": "roles/node/defaults.yml:4",
        "connect_timeout": "roles/node/defaults.yml:1",
    }
    assert str(host.origins["servers.s.args.a"]) == "roles/demo/defaults.yml:3"
    assert str(host.origins["servers.s.args.b"]) == "inventory/host_vars/gpu1.yml:6"
    assert str(host.origin("servers.s.args.zzz")) == "inventory/host_vars/gpu1.yml:6"
    assert "servers.s.timeouts.free" not in host.origins


ROLE_CHECKS = "server: {checks: {no_xid: blocker, quiet: off, shm_free_gib: 4, check_seconds: 300, names: [a]}}\n"


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        (
            "{shm_free_gib: warning}",
            ".shm_free_gib: must be a number, as the role's 4 {role}; found the text 'warning'",
        ),
        ("{shm_free_gib: off}", ".shm_free_gib: must be a number, as the role's 4 {role}; found false (written off)"),
        ("{shm_free_gib: [1, 2]}", ".shm_free_gib: must be a number, as the role's 4 {role}; found a list"),
        ("{shm_free_gib: null}", ".shm_free_gib: must be a number, as the role's 4 {role}; found nothing"),
        (
            "{check_seconds: 0}",
            ".check_seconds: must be a number of seconds above 0, as the role's 300 {role}; found the number 0",
        ),
        ("{names: 1}", ".names: must be a list, as the role's own {role}; found the number 1"),
        (
            "null",
            ": a null drops shm_free_gib, check_seconds, names, which checks go by: change single ones instead",
        ),
        ("{shm_free_gib: 0.5, check_seconds: 1, names: [], no_xid: off, quiet: warning, own: [3]}", None),
    ],
)
def test_a_threshold_stays_of_its_kind(checks: str, expected: str | None) -> None:
    text = f"all:\n  hosts:\n    a:\n      servers:\n        s: {{engine: demo, model: m, port: 1, checks: {checks}}}\n"
    inventory = load({"roles/node/defaults.yml": ROLE_CHECKS, "inventory/hosts.yml": text})
    if expected is None:
        assert inventory.host("a").servers["s"].checks["own"] == (3,)
        return
    with pytest.raises(InventoryError) as caught:
        inventory.host("a")
    said = expected.format(role="(roles/node/defaults.yml:1)")
    assert str(caught.value) == f"inventory/hosts.yml:5: servers.s.checks{said}"


@pytest.mark.parametrize(("server", "said"), [("[]", "a list"), ("x", "the text 'x'"), ("5", "the number 5")])
def test_a_server_that_is_no_mapping_has_one_thing_wrong(server: str, said: str) -> None:
    text = f"all:\n  hosts:\n    a:\n      servers:\n        s: {server}\n"
    with pytest.raises(InventoryError) as caught:
        load({"roles/node/defaults.yml": ROLE_CHECKS, "inventory/hosts.yml": text}).host("a")
    assert str(caught.value) == f"inventory/hosts.yml:5: servers.s: must be a mapping, not {said}"


def test_a_null_in_the_inventory_cuts_the_engines_defaults_too() -> None:
    host = load(
        {
            "inventory/hosts.yml": "all: {hosts: {gpu1: }}",
            "inventory/group_vars/all.yml": SERVER + "    args: null\n",
            "inventory/host_vars/gpu1.yml": "servers: {s: {args: {b: 1}}}\n",
            "roles/demo/defaults.yml": "args: {a: 1}\n",
        }
    ).host("gpu1")
    assert host.servers["s"].args == {"b": 1}


def test_a_host_drops_a_server_of_its_group() -> None:
    files = {
        "inventory/hosts.yml": "all: {hosts: {gpu1: , gpu2: }}",
        "inventory/group_vars/all.yml": SERVER,
        "inventory/host_vars/gpu2.yml": "servers: {s: null}\n",
    }
    inventory = load(files)
    assert (list(inventory.host("gpu1").servers), list(inventory.host("gpu2").servers)) == (["s"], [])


def test_one_error_for_a_group_is_told_once_for_all_its_hosts() -> None:
    inventory = load(
        {
            "inventory/hosts.yml": "all: {hosts: {'gpu[1:9]': }}",
            "inventory/group_vars/all.yml": "root: a\n",
            "inventory/host_vars/gpu3.yml": "lab: 5\n",
        }
    )
    with pytest.raises(InventoryError) as caught:
        inventory.resolve(inventory.hosts)
    assert str(caught.value).splitlines() == [
        "inventory/group_vars/all.yml:1: root: must begin with / or ~/; found the text 'a'",
        "inventory/host_vars/gpu3.yml:1: lab: must be text; found the number 5",
    ]


def test_json_of_a_host_is_safe_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    host = load(
        {
            "inventory/hosts.yml": "g: {hosts: {gpu1: }}",
            "inventory/host_vars/gpu1.yml": "ansible_port: 2222\n"
            + SERVER
            + "    secrets: {HF_TOKEN: !secret env:HF_TOKEN}\n"
            + "    gpus: [0, 1]\n    env: {A: 1, B: {value: x, mode: force}}\n",
        }
    ).host("gpu1")
    text = json.dumps(host.to_json())
    found = json.loads(text)
    assert "hunter2" not in text + repr(host)
    assert (found["host"], found["groups"], found["lint"], found["connection"]["port"]) == (
        "gpu1",
        ["all", "g"],
        [],
        2222,
    )
    server = found["servers"]["s"]
    assert server["env"] == {"A": {"value": "1", "mode": "default"}, "B": {"value": "x", "mode": "force"}}
    assert server["secrets"] == {"HF_TOKEN": "!secret env:HF_TOKEN"}
    assert server["gpus"] == [0, 1]
    assert found["origins"]["servers.s.env.B.mode"] == "inventory/host_vars/gpu1.yml:9"
    assert found["origins"]["ansible_port"] == "inventory/host_vars/gpu1.yml:1"
