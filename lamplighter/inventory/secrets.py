"""Where a secret of a server may stand, and what becomes of it: its value never leaves for a plan, a digest or a page.

What came out of a vault, of ``!secret``, or through ``lookup`` from this machine's environment or files is a secret
under ``secrets``, ``env``, ``args`` and ``extra_args``. There it travels on its own, and rests in the release's ``env``
(0600). Anywhere else a ``lookup`` is plain, since a path or a port is told to everybody, and what lay in a vault is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lamplighter.errors import InventoryError
from lamplighter.inventory.values import FilledSecret, Problems, Secret, SecretRef, Value

if TYPE_CHECKING:
    from lamplighter.inventory.schema import Server

_SHELL = re.compile(r"\$(\w+|\{\w+\})")
_CALLED_SECRET = re.compile(r"(?i)(?:^|[-_])(?:api[-_]?key|token|secret|password|passwd)$")
#: A number, a path, or what says that there is no key.
_HARMLESS = re.compile(r"(?i)[0-9.]+|[~/].*|empty|none|null|dummy|x+")
#: Settings of a server whose values may be secret.
_KEEPERS = ("secrets", "env", "args", "extra_args")


def is_secret(value: object) -> bool:
    """Whether this is the reference of a secret."""
    return isinstance(value, SecretRef | FilledSecret)


def settled(server: Value, path: str, problems: Problems) -> Value:
    """The settings with each secret in its place: those of ``env`` under ``secrets``, plain ones as what they are."""
    if server.entries is None:
        return server
    entries = {
        key: each if key in _KEEPERS else unwrapped(each, f"{path}.{key}", problems)
        for key, each in server.entries.items()
    }
    for key in ("env", "args"):
        for name, each in (entries[key].entries or {}).items() if key in entries else ():
            _warn_of_plain(name, (each.entries or {}).get("value", each), f"{path}.{key}.{name}", problems)
    env = entries.get("env")
    if env is not None and env.entries is not None:
        kept, moved = _parted(env.entries, f"{path}.env", problems)
        secrets = entries.get("secrets", Value({}, env.origin))
        known = secrets.entries or {}
        given = {name: each for name, each in {**kept, **moved}.items() if each.data is not None}  # null drops it
        for name in known.keys() & given.keys():
            place = given[name].origin
            problems.add(
                known[name].origin, f"{path}.secrets.{name}: also stands under env ({place}): keep one of them"
            )
        entries["env"] = replace(env, data=kept)
        if moved and secrets.entries is not None:
            entries["secrets"] = replace(secrets, data={**known, **moved})
    return replace(server, data=entries)


def _warn_of_plain(name: str, value: Value, path: str, problems: Problems) -> None:
    """Warn of what was probably meant to be a secret, and is text that everybody on the node may read."""
    text = value.data
    if not isinstance(text, str) or not text:
        return
    if _SHELL.fullmatch(text):
        problems.warn(
            value.origin,
            f"no shell reads this, the server gets {text} as it stands: "
            f"\"{{{{ lookup('env', '{text.strip('${}')}') }}}}\" is that variable of this machine",
            "shell-variable",
            path,
        )
    elif _CALLED_SECRET.search(name) and not _HARMLESS.fullmatch(text):
        problems.warn(
            value.origin,
            "stands here in clear, and so it will on the node: write !secret env:NAME, a vault or a lookup",
            "plain-secret",
            path,
        )


def _parted(env: Mapping[str, Value], path: str, problems: Problems) -> tuple[dict[str, Value], dict[str, Value]]:
    """The variables that may be read by anybody, and the secret ones."""
    kept: dict[str, Value] = {}
    moved: dict[str, Value] = {}
    for name, value in env.items():
        inner = (value.entries or {}).get("value", value)
        if not is_secret(inner.data):
            kept[name] = unwrapped(value, f"{path}.{name}", problems)
            continue
        mode = (value.entries or {}).get("mode")
        if mode is not None and mode.data == "force":
            problems.add(
                mode.origin,
                f"{path}.{name}.mode: a secret cannot be forced, since it would have to stand in sitecustomize.py",
            )
        moved[name] = replace(inner, origin=value.origin)
    return kept, moved


def unwrapped(value: Value, path: str, problems: Problems, *, may_be_sealed: bool = False) -> Value:
    """The value for a place that everybody may see; with ``may_be_sealed`` one out of a vault is taken there too."""
    data = value.data
    if isinstance(data, Mapping):
        entries = {
            key: unwrapped(each, f"{path}.{key}", problems, may_be_sealed=may_be_sealed) for key, each in data.items()
        }
        return replace(value, data=entries)
    if isinstance(data, tuple):
        items = tuple(unwrapped(each, path, problems, may_be_sealed=may_be_sealed) for each in data)
        return replace(value, data=items)
    if not isinstance(data, FilledSecret):
        return value
    if data.missing is not None:
        advice = f" ({data.missing.next_step})" if data.missing.next_step else ""
        problems.add(value.origin, f"{path}: {data.missing.what}{advice}")
        return replace(value, data=None)
    if data.is_vaulted and not may_be_sealed:
        problems.add(
            value.origin,
            f"{path}: comes out of a vault ({data}), and everybody may read it on the node: write it outside of the "
            "vault. Secrets may stand under secrets, env, args and extra_args",
        )
        return replace(value, data=None)
    return Value(data.data, value.origin, data.text, sealed=data.reference if data.is_vaulted else "")


def resolve_secrets(server: Server) -> dict[str, str]:
    """The secrets of a server by the variable that carries them. Never print the result.

    Reads this machine's environment and files. Raises InventoryError that lists every secret that cannot be had,
    without any value.
    """
    problems = Problems()
    values = _resolved_secrets(server, problems)
    problems.raise_if_any()
    return values


def require_secrets(servers: Iterable[Server]) -> None:
    """See that every secret of these servers can be had. Raises as ``resolve_secrets`` does, for all at once."""
    problems = Problems()
    for server in servers:
        _resolved_secrets(server, problems)
    problems.raise_if_any()


def _resolved_secrets(server: Server, problems: Problems) -> dict[str, str]:
    named = {name: (f"secrets.{name}", secret) for name, secret in server.secrets.items()}
    named |= {word.variable: (word.path, word.secret) for word in secret_words(server)}
    return {
        name: _resolved(secret, f"servers.{server.name}.{path}", problems) for name, (path, secret) in named.items()
    }


def _resolved(secret: Secret, path: str, problems: Problems) -> str:
    try:
        return secret.resolve()
    except InventoryError as error:
        advice = f" ({error.next_step})" if error.next_step else ""
        problems.add(secret.origin, f"{path}: {error.what}{advice}")
        return ""


class SecretWord(str):
    """A word of a command line that is a secret: the text is what is shown, ``variable`` is what carries it."""

    variable: str
    path: str
    secret: Secret

    @classmethod
    def at(cls, path: str, secret: Secret) -> SecretWord:
        """The word of the setting at ``path``, below its server."""
        variable = f"LAMPLIGHTER_{re.sub(r'[^A-Za-z0-9]', '_', path).upper()}"
        word = cls(f"${variable}")
        word.variable, word.path, word.secret = variable, path, secret
        return word


def secret_words(server: Server) -> list[SecretWord]:
    """The arguments of a server that are secrets."""
    words = [
        word(name, place, each)
        for name, value in server.args.items()
        for place, each in enumerate(value if isinstance(value, tuple) else (value,))
    ]
    words += [extra_word(place, each) for place, each in enumerate(server.extra_args)]
    return [each for each in words if isinstance(each, SecretWord)]


def word(name: str, place: int, value: object) -> str:
    """The word for the value of a flag, the one at ``place`` where the flag is repeated."""
    return _word(f"args.{name}" + (f".{place + 1}" if place else ""), value)


def extra_word(place: int, value: object) -> str:
    """The word for an item of ``extra_args``."""
    return _word(f"extra_args.{place + 1}", value)


def _word(path: str, value: object) -> str:
    return SecretWord.at(path, value) if isinstance(value, SecretRef | FilledSecret) else str(value)
