"""Ansible's variables about a connection, in our words: which count, which say nothing to us, which cannot be met.

Pure. What changes how we log in and cannot be met is an error where the host has servers. Elsewhere, and where a login
may well succeed without it, it is a warning. Variables that matter to Ansible alone are passed over in silence.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from lamplighter.inventory.values import EMPTY, Problems, Value, did_you_mean

#: The name that counts for us, and all that Ansible knows it by: of several that are set the last one wins.
_ALIASES = {
    "ansible_host": ("ansible_host", "ansible_ssh_host"),
    "ansible_port": ("ansible_port", "ansible_ssh_port"),
    "ansible_user": ("ansible_user", "ansible_ssh_user"),
    "ansible_ssh_private_key_file": ("ansible_private_key_file", "ansible_ssh_private_key_file"),
    "ansible_python_interpreter": ("ansible_python_interpreter",),
    "become": ("become",),
    "host_key_checking": ("ansible_host_key_checking", "ansible_ssh_host_key_checking", "host_key_checking"),
    "connect_timeout": ("ansible_timeout", "ansible_ssh_timeout", "connect_timeout"),
    "known_hosts": ("known_hosts",),
    "transport": ("transport",),
    "root": ("root",),
    "lab": ("lab",),
    "lint": ("lint",),
    "merge": ("merge",),
}
_OPTIONS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args", "ansible_paramiko_proxy_command")
_HOW = ("ansible_connection", "ansible_become_method", "ansible_become_user", "ansible_sudo_user", "ansible_shell_type")
#: Every variable that has a say here: the templates in these, and in no others, are filled in.
READ = frozenset({*(name for names in _ALIASES.values() for name in names), *_OPTIONS, *_HOW, "ansible_become"})

_OURS = (
    "servers", "become", "known_hosts", "connect_timeout", "host_key_checking", "transport", "root", "lab", "lint",
    "merge",
)  # fmt: skip
_PASSWORDS = frozenset({
    "ansible_password", "ansible_ssh_pass", "ansible_ssh_password", "ansible_become_password", "ansible_become_pass",
    "ansible_sudo_pass", "ansible_private_key", "ansible_ssh_private_key", "ansible_private_key_passphrase",
    "ansible_ssh_private_key_passphrase", "ansible_ssh_pkcs11_provider",
})  # fmt: skip
_ANSIBLES_OWN = frozenset({
    "ansible_async_dir", "ansible_become_exe", "ansible_become_flags", "ansible_sudo_exe", "ansible_sudo_flags",
    "ansible_control_path", "ansible_control_path_dir", "ansible_pipelining", "ansible_ssh_pipelining",
    "ansible_remote_tmp", "ansible_scp_executable", "ansible_scp_extra_args", "ansible_sftp_batch_mode",
    "ansible_sftp_executable", "ansible_sftp_extra_args", "ansible_shell_executable", "ansible_ssh_executable",
    "ansible_ssh_retries", "ansible_ssh_transfer_method", "ansible_ssh_use_tty", "ansible_ssh_verbosity",
    "ansible_facts", "ansible_distribution", "ansible_become_pass_file",
})  # fmt: skip

_SSH = ("ssh", "smart", "paramiko", "paramiko_ssh", "libssh")
#: Flags of ssh that take a value; and those, with or without one, that change nothing for us.
_WITH_VALUE = frozenset("bcDEeFIiJLlmOopQRSWwBP")
_EMPTY_FLAGS = frozenset("AaCcGKkmnqTtvXxYy")
#: Options of ssh_config that we follow, and such as change nothing about whether and where we log in.
_FOLLOWED = frozenset({
    "addressfamily", "certificatefile", "globalknownhostsfile", "hashknownhosts", "hostkeyalias", "hostname",
    "identitiesonly", "identityagent", "identityfile", "port", "proxycommand", "proxyjump", "revokedhostkeys", "user",
    "userknownhostsfile", "connecttimeout",
})  # fmt: skip
_WITHOUT_EFFECT = frozenset({
    "batchmode", "checkhostip", "ciphers", "compression", "connectionattempts", "controlmaster", "controlpath",
    "controlpersist", "forwardagent", "forwardx11", "gssapiauthentication", "gssapidelegatecredentials",
    "hostkeyalgorithms", "kbdinteractiveauthentication", "kexalgorithms", "loglevel", "macs", "numberofpasswordprompts",
    "passwordauthentication", "preferredauthentications", "pubkeyacceptedalgorithms", "pubkeyacceptedkeytypes",
    "pubkeyauthentication", "requesttty", "sendenv", "serveralivecountmax", "serveraliveinterval", "tcpkeepalive",
    "updatehostkeys", "visualhostkey", "challengeresponseauthentication", "ipqos", "exitonforwardfailure",
    "stricthostkeychecking",
})  # fmt: skip
#: What stands for -F, which is no keyword.
_FILE = "-F"
_CHECKING = {"no": "off", "off": "off", "accept-new": "accept-new", "yes": "strict", "ask": "strict"}
_TRUE, _FALSE = ("yes", "true", "on", "1", "y", "t"), ("no", "false", "off", "0", "n", "f")


@dataclass(frozen=True)
class Translated:
    """What a host says in our words, and the lines of ssh_config that its ``ansible_ssh_*_args`` stand for."""

    variables: Mapping[str, Value]
    ssh_options: tuple[tuple[str, str], ...]
    ssh_config: str | None


def has_servers(variables: Mapping[str, Value]) -> bool:
    """Whether a host with these variables wants a server: to others nobody logs in."""
    servers = variables.get("servers", EMPTY)
    wanted = servers.entries
    return servers.data is not None if wanted is None else any(each.data is not None for each in wanted.values())


def translate(variables: Mapping[str, Value], defaults: Mapping[str, Value], problems: Problems) -> Translated:
    """The variables of a host that count for a connection; ``defaults`` are those that no inventory has said."""
    return _Translation(variables, defaults, problems).done()


class _Translation:
    def __init__(self, variables: Mapping[str, Value], defaults: Mapping[str, Value], problems: Problems) -> None:
        self.variables = variables
        self.problems = problems
        self.said = {
            name: value
            for name, value in variables.items()
            if value.data is not None and (name not in defaults or value.origin != defaults[name].origin)
        }
        self.is_ours = has_servers(variables)

    def done(self) -> Translated:
        found: dict[str, Value] = {}
        for name, aliases in _ALIASES.items():
            given = [alias for alias in aliases if alias in self.said] or [name]
            value = self.variables.get(given[-1])
            if value is not None and value.data is not None:
                found[name] = _as_typed(given[-1], value)
        options = self._ssh_options(found)
        self._tell_how(found)
        for name, value in self.said.items():
            self._tell_strange(name, value)
        files = [value for keyword, value in options if keyword == _FILE]
        options = tuple((keyword, value) for keyword, value in options if keyword != _FILE)
        return Translated(found, options, files[-1] if files else None)

    def _tell_how(self, found: Mapping[str, Value]) -> None:
        how = self._text("ansible_connection")
        if how == "local":
            self._refuse(
                "ansible_connection",
                "this machine itself is reached over SSH as any other: write ansible_host: 127.0.0.1 and drop "
                "ansible_connection, with an sshd that runs here",
            )
        elif how and how.removeprefix("ansible.builtin.").removeprefix("ansible.netcommon.") not in _SSH:
            self._refuse("ansible_connection", f"only SSH is spoken, not {how}")
        if self._text("ansible_shell_type") in ("powershell", "cmd"):
            self._refuse("ansible_shell_type", "nodes run Linux")
        if "become" in found and found["become"].data is True:
            if self._text("ansible_become_method").removeprefix("ansible.builtin.") not in ("", "sudo"):
                self._refuse("ansible_become_method", "root is reached through sudo alone: allow the user sudo")
            for name in ("ansible_become_user", "ansible_sudo_user"):
                if self._text(name) not in ("", "root"):
                    self._refuse(name, "only root is become: log in as the user that is meant, without become")

    def _tell_strange(self, name: str, value: Value) -> None:
        if name in _PASSWORDS:
            self.problems.warn(
                value.origin,
                "not used: lamplighter logs in with keys (ansible_ssh_private_key_file, or an agent), and "
                "needs sudo without a password",
                "not-applicable",
                name,
            )
        elif name == "ansible_group_priority":
            self.problems.warn(
                value.origin,
                "has no effect here: it counts under `vars` of a group in the inventory itself",
                "not-applicable",
                name,
            )
        elif name not in READ and name not in _ANSIBLES_OWN and name != "servers":
            near = _near(name)
            if near:
                self.problems.warn(value.origin, f"unknown name{near}", "unknown-name", name)

    def _refuse(self, name: str, why: str) -> None:
        origin = self.said[name].origin
        if self.is_ours:
            self.problems.add(origin, f"{name}: {why}")
        else:
            self.problems.warn(origin, why, "not-applicable", name)

    def _text(self, name: str) -> str:
        value = self.said.get(name)
        return "" if value is None or not isinstance(value.data, str) else value.data.strip()

    # -- ansible_ssh_common_args and its siblings

    def _ssh_options(self, found: dict[str, Value]) -> tuple[tuple[str, str], ...]:
        options: list[tuple[str, str]] = []
        for variable in _OPTIONS:
            text = self._text(variable)
            if variable == "ansible_paramiko_proxy_command" and text:
                options.append(("proxycommand", text))
            elif text:
                options += self._options_in(variable, text)
        kept = []
        for keyword, value in options:
            if keyword != "stricthostkeychecking":
                kept.append((keyword, value))
            elif value.lower() in _CHECKING and not self.said.keys() & set(_ALIASES["host_key_checking"]):
                origin = next(self.said[each].origin for each in _OPTIONS if each in self.said)
                found["host_key_checking"] = Value(_CHECKING[value.lower()], origin, value)
        return tuple(kept)

    def _options_in(self, variable: str, text: str) -> Iterable[tuple[str, str]]:
        try:
            words = shlex.split(text)
        except ValueError as error:
            self._refuse(variable, f"{str(error).lower()} in {text!r}")
            return
        rest = iter(words)
        for word in rest:
            flag, value = word[1:2], word[2:]
            if not word.startswith("-") or not flag:
                self._refuse(variable, f"{word!r} is no option of ssh")
            elif flag in _WITH_VALUE:
                yield from self._option(variable, flag, value or next(rest, ""))
            elif flag in "46":
                yield "addressfamily", {"4": "inet", "6": "inet6"}[flag]
            elif set(word[1:]) - _EMPTY_FLAGS:
                self._cannot(variable, word)

    def _option(self, variable: str, flag: str, value: str) -> Iterable[tuple[str, str]]:
        keyword = {"J": "proxyjump", "i": "identityfile", "l": "user", "p": "port", "F": _FILE}.get(flag)
        if flag == "o":
            keyword, is_equal, value = value.partition("=")
            if not is_equal:
                keyword, _, value = keyword.strip().partition(" ")
            keyword, value = keyword.strip().lower(), value.strip()
        if keyword in _FOLLOWED or keyword in (_FILE, "stricthostkeychecking"):
            yield keyword, value
        elif flag not in _EMPTY_FLAGS and keyword not in _WITHOUT_EFFECT:
            self._cannot(variable, f"-{flag} {keyword or value}".strip())

    def _cannot(self, variable: str, what: str) -> None:
        self._refuse(variable, f"{what} is not followed: write it for this host into ~/.ssh/config, or drop it")


def _as_typed(name: str, value: Value) -> Value:
    """The value of a variable with the type that it has for Ansible: ``"yes"`` is a switch, ``"2222"`` is a port."""
    if name == "become":
        switch = _switch_of(value)
        return value if switch is None else replace(value, data=switch)
    if name in ("ansible_host_key_checking", "ansible_ssh_host_key_checking"):
        switch = _switch_of(value)
        return value if switch is None else replace(value, data="strict" if switch else "off")
    if name == "host_key_checking" and value.data is False and value.text.lower() == "off":
        return replace(value, data="off")  # YAML reads the bare word as false
    if name.endswith(("_port", "_timeout")) and isinstance(value.data, str) and _is_plain(value.data):
        return replace(value, data=int(value.data))
    if name.endswith("_user") and isinstance(value.data, int) and not isinstance(value.data, bool):
        return replace(value, data=value.text)
    if name == "ansible_python_interpreter" and isinstance(value.data, str):
        words = value.data.split()
        if value.data.startswith("auto"):  # Ansible looks for one on the node: ours may be any from 3.9 on
            return replace(value, data="python3")
        if len(words) == 2 and words[0] == "/usr/bin/env":
            return replace(value, data=words[1])
    return value


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and not text.startswith("0")


def _switch_of(value: Value) -> bool | None:
    said = str(value.data).strip().lower()
    return True if said in _TRUE else False if said in _FALSE else None


@cache
def _near(name: str) -> str:
    """The hint at a name of ours, or of Ansible, that is very close."""
    if name.startswith("ansible_"):
        return did_you_mean(name, READ | _PASSWORDS, cutoff=0.88)
    return did_you_mean(name, _OURS, cutoff=0.8)
