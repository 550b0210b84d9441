"""Which keys are tried for a login, in which order, and what is told when none is accepted."""

from __future__ import annotations

import base64
import copy
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from paramiko.agent import AgentSSH
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType, SSHException

from lamplighter.errors import UNTOUCHED, LoginFailed
from lamplighter.paths import at_home, read_file
from lamplighter.ssh.config import Settings
from lamplighter.ssh.known_hosts import fingerprint
from lamplighter.ssh.wire import Transport, label_of

#: Bytes of a key or a certificate; one has some thousands.
KEY_LIMIT = 1 << 20
#: Seconds for each answer of an ssh-agent, which may ask its owner first; less than those for the whole login.
AGENT_TIMEOUT = 20.0


class Login:
    """Tries keys as OpenSSH would, and remembers what it tried; paramiko calls this an auth strategy."""

    def __init__(
        self,
        name: str,
        connection: Any,
        settings: Settings,
        key_file: str | None,
        user_ssh: Path,
        *,
        is_jump: bool = False,
    ) -> None:
        self._name = name
        self._is_jump = is_jump
        self._label = label_of(connection)
        self._user: str = connection.user
        self._only_identities = settings.says_yes("identitiesonly")
        self._agent_address = _agent_address(settings.get("identityagent"))
        said = settings.all("identityfile")
        wanted = [key_file] if key_file else []
        wanted += [file for file in said or () if file.lower() != "none"]
        self._explicit = key_file
        self._identities = [at_home(file) for file in wanted]
        self._certificates = [Path(file) for file in settings.all("certificatefile") or ()]
        usual = [user_ssh / name for name in ("id_ed25519", "id_ecdsa", "id_rsa")]
        self._defaults = [] if wanted or said else [file for file in usual if file.exists()]
        self._tried: list[str] = []
        self._accepted: list[str] = []  # each was right, and not enough
        self._unusable: list[str] = []
        self._encrypted: list[Path] = []

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Log in, with as many keys as the node wants, or raise LoginFailed with everything that was tried."""
        allowed: Sequence[str] = ()
        agent = self._open_agent()
        try:
            for key, told in self._keys(agent):
                try:
                    more = transport.auth_publickey(self._user, key)
                except BadAuthenticationType as error:
                    allowed = error.allowed_types
                    self._tried.append(told)
                    break
                except (SSHException, EOFError, OSError, ValueError) as error:
                    rejected = type(error) is AuthenticationException
                    self._tried.append(told if rejected else f"{told}: {error or type(error).__name__}")
                    if not transport.is_active():
                        break
                    continue
                if not more:
                    return
                allowed = more
                self._accepted.append(told)
                if "publickey" not in more:
                    break
            else:
                if not self._accepted:
                    allowed = self._ask_without_key(transport)
                if transport.is_authenticated():
                    return
        finally:
            if agent:
                agent.close()
        raise self._failed(transport, allowed)

    def _ask_without_key(self, transport: paramiko.Transport) -> Sequence[str]:
        """Some nodes know their users by the network alone; the others say which methods they allow."""
        try:
            transport.auth_none(self._user)
        except BadAuthenticationType as error:
            return error.allowed_types
        except (SSHException, EOFError, OSError):
            pass
        return ()

    def _open_agent(self) -> _Agent | None:
        if not self._agent_address:
            return None
        try:
            return _Agent(self._agent_address)
        except (SSHException, OSError, EOFError) as error:
            told = error.strerror if isinstance(error, OSError) and error.strerror else error
            self._unusable.append(f"ssh-agent at {self._agent_address}: {told}")
            return None

    def _keys(self, agent: _Agent | None) -> Iterator[tuple[paramiko.PKey, str]]:
        """Named key files first: an agent full of other keys would use up the node's MaxAuthTries before them."""
        held = list(agent.get_keys()) if agent else []
        seen: set[bytes] = set()
        for file in self._identities or self._defaults:
            is_public = _public_blob(file) is not None
            key = None if is_public else self._load(file)
            public = key.asbytes() if key else _public_blob(file) or _public_blob(Path(f"{file}.pub"))
            from_agent = [one for one in held if public and _certified_blob(one.asbytes()) == public]
            if public in seen:
                continue
            if key is not None:
                seen.add(key.asbytes())
                for certificate in (Path(f"{file}-cert.pub"), *self._certificates):
                    if _certified_by(certificate) == public:
                        yield _with_certificate(key, certificate), f"{file} with {certificate}"
                yield key, f"{file} ({fingerprint(key.asbytes())})"
            elif from_agent:
                for one in sorted(from_agent, key=lambda one: one.asbytes() == public):  # a certificate first
                    seen.add(one.asbytes())
                    yield one, f"{file} by the agent" + ("" if one.asbytes() == public else ", with its certificate")
            elif file in self._encrypted:
                self._unusable.append(f"{file} is encrypted and no ssh-agent holds it")
            elif is_public:
                self._unusable.append(f"{file} is a public key and no ssh-agent holds the private one")
        if self._only_identities:
            return
        for one in held:
            if one.asbytes() not in seen:
                yield one, f"agent key {getattr(one, 'comment', '') or one.get_name()} ({fingerprint(one.asbytes())})"

    def _load(self, file: Path) -> paramiko.PKey | None:
        try:
            for each in (file, Path(f"{file}-cert.pub")):  # both are read
                if each == file or each.exists():
                    read_file(each, KEY_LIMIT)
            key: paramiko.PKey = paramiko.PKey.from_path(file.absolute())
        except TypeError:  # cryptography's word for "needs a passphrase"
            self._encrypted.append(file)
        except FileNotFoundError:
            # ssh_config often names files that exist on some machines only; the inventory should know better.
            if str(file) == str(at_home(self._explicit or "")):
                self._unusable.append(f"{file} does not exist")
        except OSError as error:
            self._unusable.append(f"{error.filename or file}: {error.strerror or error}")
        except Exception as error:  # a broken key makes three libraries raise what they like
            self._unusable.append(f"{file} is not a usable private key ({error or type(error).__name__})")
        else:
            key.public_blob = None  # a certificate beside it is tried apart, and the key without it after that
            return key
        return None

    def _failed(self, transport: paramiko.Transport, allowed: Sequence[str]) -> LoginFailed:
        said = transport.words[-1] if isinstance(transport, Transport) and transport.words else ""
        words = [f"tried {'; '.join(self._tried)}"] if self._tried else []
        wants_more_keys = bool(self._accepted) and "publickey" in allowed
        if self._accepted:
            told = f"{' and '.join(self._accepted)} {'was' if len(self._accepted) == 1 else 'were'} accepted"
            none_left = ", and there is none left to try" if transport.is_active() else ""
            wish = f"one key more{none_left}" if wants_more_keys else f"{' and '.join(allowed)} as well"
            words.append(f"{told}, but the node wants {wish}")
        why = "; ".join([*(words or ["there was no key to try"]), *self._unusable])
        if not self._agent_address:
            why += "; no ssh-agent"
        if allowed:
            why += f"; the node allows {', '.join(allowed)}"
        if said:
            why += f"; it said: {said}"
        if self._is_jump:  # the inventory speaks of the node alone
            there, key, setting = "the jump host", "its IdentityFile in ssh_config", "its User in ssh_config"
        else:
            there, key, setting = "the node", "ansible_ssh_private_key_file", "ansible_user"
        if "too many authentication failures" in said.lower():
            in_inventory = "" if self._is_jump else f"{key}, or with "
            advice = (
                f"{there} listens to a few keys only (MaxAuthTries): name the right one with {in_inventory}"
                "IdentityFile and IdentitiesOnly yes in ssh_config"
            )
        elif self._accepted and not wants_more_keys:
            advice = (
                f"lamplighter logs in with keys alone: let AuthenticationMethods in the sshd_config of {there} be "
                f"content with publickey for {self._user}"
            )
        elif self._encrypted:
            advice = f"load the key: ssh-add {shlex.quote(str(self._encrypted[0]))}"
        elif wants_more_keys:
            advice = (
                f"{there} wants several keys (AuthenticationMethods in its sshd_config): each must be in "
                f"~{self._user}/.ssh/authorized_keys there, and be named by IdentityFile in ssh_config or held by the "
                "ssh-agent here"
            )
        elif self._tried:
            advice = f"put one of these keys into ~{self._user}/.ssh/authorized_keys on {there}, or set {setting}"
        else:
            advice = f"set {key}, or load a key with ssh-add"
        return LoginFailed(
            f"{self._name}: the login as {self._label} failed", why=why, serving=UNTOUCHED, next_step=advice
        )


class _Agent(AgentSSH):
    """The ssh-agent on a socket. paramiko's own knows but one address, and waits for an answer without any limit."""

    def __init__(self, address: str) -> None:
        super().__init__()
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        wire.settimeout(AGENT_TIMEOUT)
        try:
            wire.connect(address)
            self._connect(wire)  # type: ignore[attr-defined]  # the stubs name no private parts
        except BaseException:
            wire.close()
            raise

    def _send_message(self, message: Any) -> Any:
        try:
            return super()._send_message(message)  # type: ignore[misc]
        except TimeoutError:
            raise SSHException(f"the ssh-agent did not answer within {AGENT_TIMEOUT:g} s") from None

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


def _agent_address(said: str) -> str:
    """Where IdentityAgent finds the agent; empty for none."""
    if said.lower() == "none":
        return ""
    if said.startswith("$"):
        return os.environ.get(said[1:], "")
    return os.environ.get("SSH_AUTH_SOCK", "") if said in ("", "SSH_AUTH_SOCK") else said


def _public_blob(file: Path) -> bytes | None:
    """The public key in ``file``, a certificate's own: enough to find the private one in an agent."""
    try:
        kind, text = read_file(file, KEY_LIMIT).decode().split()[:2]
        blob = base64.b64decode(text, validate=True)
    except (OSError, ValueError):
        return None
    return _certified_blob(blob) if blob[4 : 4 + int.from_bytes(blob[:4], "big")] == kind.encode() else None


def _certified_by(file: Path) -> bytes | None:
    """The public key for which ``file`` is a certificate; None where it is none, or is not there."""
    try:
        blob = base64.b64decode(read_file(file, KEY_LIMIT).split()[1])
    except (OSError, ValueError, IndexError):
        return None
    certified = _certified_blob(blob)
    return None if certified == blob else certified


def _certified_blob(blob: bytes) -> bytes:
    """The public key that a certificate speaks of; anything else as it is."""
    kind = blob[4 : 4 + int.from_bytes(blob[:4], "big")]
    if not kind.endswith(b"-cert-v01@openssh.com"):
        return blob
    try:
        identity = serialization.load_ssh_public_identity(kind + b" " + base64.b64encode(blob))
    except (ValueError, UnsupportedAlgorithm):
        return blob
    if not isinstance(identity, serialization.SSHCertificate):
        return blob
    key = identity.public_key()
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return base64.b64decode(text.split()[1])


def _with_certificate(key: paramiko.PKey, file: Path) -> paramiko.PKey:
    certified = copy.copy(key)
    certified.load_certificate(str(file))
    return certified
