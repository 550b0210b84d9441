"""YAML with origins: every mistake has its file:line, every value remembers its place through merging."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamplighter.errors import InventoryError
from lamplighter.inventory import Origin, SecretRef
from lamplighter.inventory.sources.yaml_file import read_mapping
from lamplighter.inventory.values import Problems, Value, merge, merge_all, plain, strip, walk


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str | bytes, name: str = "f.yml") -> Value:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    problems = Problems()
    value = read_mapping(Path(name), problems)
    problems.raise_if_any()
    return value


def lines(value: Value) -> dict[str, int]:
    return {path: each.origin.line for path, each in walk(value)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\n\tb: 2\n", "f.yml:2: YAML does not allow a tab here: indent with spaces"),
        (b"a: 1\nb: \xff\n", "f.yml:2: not UTF-8 text (byte 0xff)"),
        ("a: 1\nb: \x01\n", "f.yml:2: a control character (0x01)"),
        ("a: 1\nb: x: y\n", "f.yml:2: not YAML: mapping values are not allowed here"),
        ("a: 1\nb: [1,\n", "f.yml:3: not YAML:"),
        ("a: 1\nb: 'x\n", "begun on line 2"),
        ("a: 1\n---\nb: 2\n", "f.yml:2: a second document begins here"),
        ("servers:\n  a: 1\n  b: 2\n\n  a: 3\n", "f.yml:5: a is given twice in one mapping (first on line 2)"),
        ("servers:\n  x: {'on': 1, on: 2}\n", "f.yml:2: on is given twice in one mapping (first on line 2)"),
        ("- a\n", "f.yml:1: the file must hold a mapping, not a list"),
        ("\n\njust text\n", "f.yml:3: the file must hold a mapping, not the text 'just text'"),
        ('a: 1\nb: "x\\0y"\n', "f.yml:2: a NUL byte"),
        ('a: 1\n"x\\0y": 2\n', "f.yml:2: a NUL byte"),
        ('a: "\\ud800"\n', "f.yml:1: half a surrogate pair"),
        ("a: 1\nb: *nowhere\n", "f.yml:2: not YAML: found undefined alias"),
        ("a: 1\nb: &x [1, *x]\n", "f.yml:2: an alias holds itself"),
        ("a: {{ name }}\n", "f.yml:1: a key must be a plain name (a template must be quoted"),
        ("a:\n  ? \n  : 2\n", "f.yml:2: a key is empty"),
        ("a: 1\nb: !env x\n", "f.yml:2: unknown tag !env: write !secret env:NAME"),
        ("a: 1\nb: !!python/name:os.system x\n", "f.yml:2: unknown tag !!python/name:os.system"),
        ("a: 1\nb: !!python/object/apply:os.system [x]\n", "f.yml:2: the tag !!python/object/apply:os.system"),
        ("a: 1\nb: !!set {x}\n", "f.yml:2: the tag !!set"),
        ("a: !!bool perhaps\n", "f.yml:1: unknown tag !!bool"),
        ("a: !secret hunter2\n", "f.yml:1: !secret must be followed by env:NAME or file:PATH"),
        ("a: !secret 'env:not a name'\n", "f.yml:1: !secret env: must be followed by the name"),
        ("a: 1\n<<: 5\n", "f.yml:2: << takes a mapping or a list of mappings, not the number 5"),
        ("a: " + "[" * 800 + "]" * 800, "f.yml:1: values are nested too deeply"),
    ],
)
def test_a_broken_file_is_named_with_its_line(text: str | bytes, expected: str) -> None:
    with pytest.raises(InventoryError) as caught:
        read(text)
    assert expected in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_misplaced_secret_is_not_repeated_in_the_error() -> None:
    with pytest.raises(InventoryError) as caught:
        read("a: !secret hunter2\n")
    assert "hunter2" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    problems = Problems()
    read_mapping(Path("absent.yml"), problems)
    with pytest.raises(InventoryError, match=r"^absent\.yml: cannot be read: No such file"):
        problems.raise_if_any()


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "---\n", "null\n", "{}\n", b"\xef\xbb\xbf# BOM\n"])
def test_an_empty_file_is_an_empty_mapping(text: str | bytes) -> None:
    assert plain(read(text)) == {}


def test_all_problems_of_a_file_come_together_each_once() -> None:
    with pytest.raises(InventoryError) as caught:
        read("servers: {a: 1,\n  a: 2}\nb: !x y\n")
    assert str(caught.value).splitlines() == [
        "f.yml:2: a is given twice in one mapping (first on line 1)",
        "f.yml:3: unknown tag !x",
    ]


def test_of_a_name_of_others_that_is_given_twice_the_last_counts_and_it_is_told() -> None:
    Path("f.yml").write_text(
        "a: 1\nb: {c: 1, c: 2}\na: 3\nz: &z {y: 1}\nx: {<<: *z, <<: {w: 1}, y: 2}\n", encoding="utf-8"
    )
    problems = Problems()
    assert plain(read_mapping(Path("f.yml"), problems)) == {
        "a": 3, "b": {"c": 2}, "z": {"y": 1}, "x": {"y": 2, "w": 1},
    }  # fmt: skip
    problems.raise_if_any()
    assert [str(each) for each in problems.warnings] == [
        "f.yml:2: c: is given twice in one mapping (first on line 2): the last one counts",
        "f.yml:3: a: is given twice in one mapping (first on line 1): the last one counts",
    ]


@pytest.mark.parametrize("make", [os.mkfifo, lambda name: os.symlink("/dev/zero", name), os.mkdir])
def test_what_is_no_file_is_not_opened(make: Callable[[str], None]) -> None:
    make("f.yml")
    problems = Problems()
    read_mapping(Path("f.yml"), problems)
    with pytest.raises(InventoryError, match=r"^f\.yml: is no regular file"):
        problems.raise_if_any()


def test_a_file_that_is_far_too_large_is_not_read() -> None:
    with open("f.yml", "wb") as file:
        file.truncate(1 << 40)
    problems = Problems()
    read_mapping(Path("f.yml"), problems)
    with pytest.raises(InventoryError, match=r"^f\.yml: is larger than 64 MiB"):
        problems.raise_if_any()


@pytest.mark.parametrize("opening", ["[", "{a: "])
def test_what_is_nested_too_deeply_is_told_with_its_line(opening: str) -> None:
    for depth in (1200, 40_000):
        with pytest.raises(InventoryError, match=r"f\.yml:2: "):
            read("a: 1\nb: " + opening * depth)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("8000", 8000),
        ("-1", -1),
        ("0", 0),
        ("08000", "08000"),
        ("010", "010"),
        ("0x1f", "0x1f"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("9" * 5000, "9" * 5000),
        ("0.5.16", "0.5.16"),
        ("0.10", 0.1),
        (".5", 0.5),
        ("1e3", "1e3"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1.0e+999", "1.0e+999"),
        ("on", True),
        ("No", False),
        ("'on'", "on"),
        ("~", None),
        ("", None),
        ("=", "="),
        ("!!str 12", "12"),
        ("!!int '12'", 12),
    ],
)
def test_scalars(written: str, expected: object) -> None:
    found = plain(read(f"a: {written}\n"))
    assert found == {"a": expected}
    assert type(found["a"]) is type(expected)  # type: ignore[index]


def test_keys_are_names_as_written() -> None:
    assert plain(read("on: 1\nNO: 2\n1: 3\n0.10: 4\n")) == {"on": 1, "NO": 2, "1": 3, "0.10": 4}


def test_every_value_has_the_line_of_its_key() -> None:
    value = read("# comment\na:\n  b: |\n    text\n    more\n  c: [1,\n      2]\nd: {e: 1,\n    f: 2}\r\ng: 1\n")
    assert lines(value) == {"a": 2, "a.b": 3, "a.c": 6, "d": 8, "d.e": 8, "d.f": 9, "g": 10}


def test_aliases_and_merge_keys_keep_the_line_where_the_value_stands() -> None:
    value = read(
        "one: &one\n  x: 1\n  y: 1\ntwo: &two\n  y: 2\n"
        "both:\n  <<: [*one, *two]\n  z: 3\nsame: *one\nown: {<<: *one, x: 5}\n"
    )
    found = plain(value)
    assert found["both"] == {"x": 1, "y": 1, "z": 3}  # type: ignore[index]
    assert found["own"] == {"x": 5, "y": 1}  # type: ignore[index]
    at = lines(value)
    assert (at["both.x"], at["both.y"], at["both.z"], at["same"], at["same.x"], at["own.x"]) == (2, 3, 8, 9, 2, 10)


def test_aliases_of_aliases_do_not_eat_the_memory() -> None:
    text = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n"
    text += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    with pytest.raises(InventoryError, match=r"f\.yml:\d+: aliases grow into more than"):
        read(text)


def test_paths_below_here_are_short_and_others_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    assert str(read("a: 1\n", str(tmp_path / "deep" / "f.yml")).origin) == "deep/f.yml:1"
    monkeypatch.chdir(tmp_path / "deep")
    assert str(read("a: 1\n", str(tmp_path / "f.yml")).origin) == f"{tmp_path}/f.yml:1"


# ---- Merging -------------------------------------------------------------------------------------------------------

KEYS = st.sampled_from("abcd")


def values(file: str) -> st.SearchStrategy[Value]:
    places = st.integers(1, 99).map(lambda line: Origin(file, line))
    scalars = st.builds(Value, st.none() | st.integers(0, 9) | st.tuples(), places)
    return st.recursive(
        scalars, lambda inner: st.builds(Value, st.dictionaries(KEYS, inner, max_size=4), places), max_leaves=12
    )


def layers(file: str) -> st.SearchStrategy[Value]:
    return st.builds(Value, st.dictionaries(KEYS, values(file), max_size=4), st.just(Origin(file, 1)))


@given(layers("low"), layers("middle"), layers("high"))
def test_merging_is_associative(low: Value, middle: Value, high: Value) -> None:
    assert merge(merge(low, middle), high) == merge(low, merge(middle, high))


@given(layers("one"))
def test_merging_with_nothing_or_itself_changes_nothing(layer: Value) -> None:
    assert merge(Value({}, Origin("x")), layer) == layer
    assert plain(merge(layer, Value({}, Origin("x")))) == plain(layer)
    assert plain(merge(layer, layer)) == plain(layer)


@given(st.lists(layers("?"), max_size=4))
def test_an_origin_names_a_layer_that_really_holds_the_value(found: list[Value]) -> None:
    named = [_relabel(layer, f"file{number}") for number, layer in enumerate(found)]
    by_file = {f"file{number}": dict(walk(layer)) for number, layer in enumerate(named)}
    for path, value in walk(strip(merge_all(named))):
        there = by_file[value.origin.file][path]
        assert there.origin == value.origin
        if value.entries is None:
            assert there.data == value.data
        else:
            assert there.entries is not None


@given(layers("low"), layers("high"))
def test_the_highest_layer_that_speaks_wins(low: Value, high: Value) -> None:
    merged = dict(walk(merge(low, high)))
    for path, value in walk(high):
        assert plain(merged[path]) == plain(value) or value.entries is not None
    assert set(merged) >= {path for path, _ in walk(high)}


@given(layers("one"))
def test_stripping_leaves_no_null(layer: Value) -> None:
    assert all(value.data is not None for _, value in walk(strip(layer)))


def _relabel(value: Value, file: str) -> Value:
    data = value.data
    if value.entries is not None:
        data = {key: _relabel(each, file) for key, each in value.entries.items()}
    return Value(data, Origin(file, value.origin.line))


def test_null_drops_what_lies_below_and_a_mapping_above_it_starts_anew() -> None:
    low = read("m: {a: 1, b: 2}\nn: 1\n", "low.yml")
    middle = read("m: null\nn: ~\n", "middle.yml")
    high = read("m: {c: 3}\n", "high.yml")
    assert plain(strip(merge_all([low, middle]))) == {}
    assert plain(strip(merge_all([low, middle, high]))) == {"m": {"c": 3}}


def test_lists_are_replaced() -> None:
    merged = merge(read("l: [1, 2]\n", "low.yml"), read("l: [3]\n", "high.yml"))
    assert plain(merged) == {"l": (3,)}
    assert str(merged.entries["l"].origin) == "high.yml:1"  # type: ignore[index]


# ---- Secrets -------------------------------------------------------------------------------------------------------


def secret(written: str, name: str = "f.yml") -> SecretRef:
    found = plain(read(f"a: {written}\n", name))["a"]  # type: ignore[index]
    assert isinstance(found, SecretRef)
    return found


def test_a_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2 ")
    reference = secret("!secret env:TOKEN")
    assert reference.resolve() == "hunter2 "
    assert "hunter2" not in f"{reference} {reference!r} {vars(reference)}"
    assert str(reference) == "!secret env:TOKEN"


def test_a_secret_from_a_file_beside_the_inventory(tmp_path: Path) -> None:
    (tmp_path / "inv").mkdir()
    (tmp_path / "inv" / "token").write_bytes(b"hunter2\n")
    assert secret("!secret file:token", "inv/f.yml").resolve() == "hunter2"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("!secret env:ABSENT_TOKEN", "f.yml:1: !secret env:ABSENT_TOKEN: the environment variable is not set"),
        ("!secret env:EMPTY_TOKEN", "f.yml:1: !secret env:EMPTY_TOKEN is empty"),
        ("!secret file:absent", "f.yml:1: !secret file:absent: absent cannot be read: No such file"),
        ("!secret file:~nobody-here/k", "f.yml:1: !secret file:~nobody-here/k: ~nobody-here/k cannot be read: No such"),
        ("!secret file:binary", "f.yml:1: !secret file:binary is not UTF-8 text"),
        ("!secret file:nul", "f.yml:1: !secret file:nul holds a NUL byte"),
    ],
)
def test_a_secret_that_cannot_be_had(written: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY_TOKEN", "")
    Path("binary").write_bytes(b"hunter2\xff")
    Path("nul").write_bytes(b"hunter2\0")
    with pytest.raises(InventoryError) as caught:
        secret(written).resolve()
    assert str(caught.value).startswith(expected)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
