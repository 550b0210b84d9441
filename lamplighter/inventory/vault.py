"""Ansible Vault, read: text that lies encrypted in the inventory, and the passwords that open it.

Opened is only what somebody asks for; a password is read, or its script run, when the first text needs it. Nothing
raised here quotes a password or a decrypted text. Format 1.1 and 1.2, AES256, as `ansible-vault` writes them.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from lamplighter.errors import UsageError
from lamplighter.inventory.sources.yaml_file import VAULT, read_text
from lamplighter.inventory.values import Problems, Sealed, SecretMissing, Value, marked
from lamplighter.paths import at_home

#: Seconds for a script that prints a password: it may ask a password manager over a network.
SCRIPT_SECONDS = 60.0
_CLIENT = re.compile(r".+-client(\.\w+)?")
_HINT = "give --vault-password-file, or set ANSIBLE_VAULT_PASSWORD_FILE on this machine"


@dataclass(frozen=True)
class PasswordSource:
    """Where a password comes from: a file, or a program that prints it, for the vault id ``label``."""

    label: str
    path: Path

    def read(self) -> bytes:
        """The password. Raises UsageError where it cannot be had."""
        try:
            is_program = self.path.is_file() and os.access(self.path, os.X_OK)
            found = self._printed() if is_program else self.path.read_bytes()
        except OSError as error:
            raise UsageError(f"the vault password file {self.path} cannot be read: {error.strerror}") from None
        password = found.strip()
        if not password:
            raise UsageError(f"the vault password file {self.path} gives an empty password")
        return password

    def _printed(self) -> bytes:
        words = [str(self.path), *(["--vault-id", self.label] if _CLIENT.fullmatch(self.path.name) else [])]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=SCRIPT_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"the vault password script {self.path} took over {SCRIPT_SECONDS:.0f} s") from None
        if done.returncode:  # what it printed may be the password: it is not quoted
            raise UsageError(
                f"the vault password script {self.path} ended with {done.returncode}",
                next_step="see by hand what it says: here it might say the password",
            )
        return done.stdout


def password_sources(
    files: Sequence[str], ids: Sequence[str], environment: Mapping[str, str]
) -> tuple[PasswordSource, ...]:
    """The sources that the command line and Ansible's own variables name. Raises UsageError for ``prompt``."""
    listed = [each.strip() for each in environment.get("ANSIBLE_VAULT_IDENTITY_LIST", "").split(",")]
    named = [*(each for each in listed if each), *ids]
    plain = [*files] or [environment.get("ANSIBLE_VAULT_PASSWORD_FILE", "")]
    return (*map(_source, named), *(PasswordSource("default", _path(each)) for each in plain if each))


def _source(written: str) -> PasswordSource:
    label, at, place = written.rpartition("@")
    if place == "prompt":
        raise UsageError("a vault password is not asked for", next_step="name a file or a script: ID@FILE")
    return PasswordSource(label if at and label else "default", _path(place))


def _path(written: str) -> Path:
    return Path.cwd() / at_home(written)


@dataclass
class Vault:
    """Opens what is sealed, with the passwords at hand; each is read once, and only when it is needed."""

    sources: Sequence[PasswordSource] = ()
    _passwords: dict[PasswordSource, bytes] = field(default_factory=dict, repr=False)
    _files: dict[Path, Value] = field(default_factory=dict, repr=False)

    def open(self, sealed: Sealed) -> str | int | float:
        """What is sealed. Raises SecretMissing where no password is given or none fits, or it is damaged."""
        if sealed.path is not None:
            return self._value_of_sops(sealed, sealed.path)
        label, parts = _envelope(sealed)
        if not self.sources:
            raise SecretMissing(f"{sealed} cannot be opened: no vault password is given", sealed.origin, _HINT)
        for source in self._by_label(label):
            if source not in self._passwords:
                self._passwords[source] = source.read()
            plain = _decrypted(self._passwords[source], *parts)
            if plain is None:
                continue
            try:
                return plain.decode("utf-8")
            except UnicodeDecodeError:
                raise SecretMissing(f"{sealed} holds no UTF-8 text", sealed.origin) from None
        tried = ", ".join(str(source.path) for source in self.sources)
        which = f" (it was sealed for the vault id {label})" if label else ""
        raise SecretMissing(
            f"{sealed} cannot be opened: no password fits, or its text was changed{which}",
            sealed.origin,
            f"tried: {tried}",
        )

    def _value_of_sops(self, sealed: Sealed, path: Path) -> str | int | float:
        if path not in self._files:
            self._files[path] = read_text(_opened_by_sops(sealed, path), path, Problems())
        value: Value | None = self._files[path]
        for key in sealed.keys:
            value = _part(value, key)
        if value is None or not isinstance(value.data, str | int | float):
            raise SecretMissing(f"{sealed}: sops gives no such value", sealed.origin)
        return value.data

    def _by_label(self, label: str) -> Iterator[PasswordSource]:
        yield from sorted(self.sources, key=lambda source: source.label != label)


def _part(value: Value | None, key: str) -> Value | None:
    if value is None or value.entries is not None:
        return None if value is None else (value.entries or {}).get(key)
    items = value.data if isinstance(value.data, tuple) else ()
    return items[int(key)] if key.isdigit() and int(key) < len(items) else None


def opened(value: Value, vault: Vault, problems: Problems) -> Value:
    """What a whole file holds that was read sealed, each value marked as a secret; any other value as it is."""
    sealed = value.data
    if not isinstance(sealed, Sealed):
        return value
    try:
        text = str(vault.open(sealed))
    except SecretMissing as lacking:
        problems.add(sealed.origin, f"{lacking.what}{f' ({lacking.next_step})' if lacking.next_step else ''}")
        return Value({}, value.origin)
    content = read_text(text, Path(sealed.origin.file), problems)
    entries = {key: marked(each, sealed=f"!vault ({each.origin})") for key, each in (content.entries or {}).items()}
    return replace(content, data=entries)


def _envelope(sealed: Sealed) -> tuple[str, tuple[bytes, bytes, bytes]]:
    """The vault id and salt, signature and ciphertext. Raises SecretMissing where the text is no whole vault."""
    head, *body = sealed.text.split()
    words = head.split(";")
    if words[:1] != [VAULT[:-1]] or words[1:3] not in (["1.1", "AES256"], ["1.2", "AES256"]):
        raise SecretMissing(f"{sealed} is no vault of a known format (1.1 or 1.2, AES256)", sealed.origin)
    try:
        salt, signature, data = (binascii.unhexlify(part) for part in binascii.unhexlify("".join(body)).split(b"\n"))
    except (ValueError, binascii.Error):
        raise SecretMissing(
            f"{sealed} is damaged: part of its text is missing or changed",
            sealed.origin,
            "encrypt it again: ansible-vault",
        ) from None
    return words[3] if len(words) > 3 else "", (salt, signature, data)


def _opened_by_sops(sealed: Sealed, path: Path) -> str:
    try:
        done = subprocess.run(
            ["sops", "--decrypt", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=SCRIPT_SECONDS,
        )
    except FileNotFoundError:
        raise SecretMissing(
            f"{sealed} cannot be opened: the program sops is not installed", sealed.origin, "install sops"
        ) from None
    except subprocess.TimeoutExpired:
        raise SecretMissing(f"{sealed}: sops took over {SCRIPT_SECONDS:.0f} s", sealed.origin) from None
    if done.returncode:
        raise SecretMissing(
            f"{sealed} cannot be opened: sops ended with {done.returncode}",
            sealed.origin,
            f"see what `sops --decrypt {path}` says",
        )
    return done.stdout.decode("utf-8", "replace")


@lru_cache(maxsize=256)  # a fleet's files share few salts, and each takes a hundredth of a second
def _keys(password: bytes, salt: bytes) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", password, salt, 10000, 80)


def _decrypted(password: bytes, salt: bytes, signature: bytes, data: bytes) -> bytes | None:
    """What lies in the vault; None where the password is another one."""
    # Costs 7 MB and a tenth of a second, and few inventories hold a vault.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.padding import PKCS7

    keys = _keys(password, salt)
    if not hmac.compare_digest(hmac.digest(keys[32:64], data, "sha256"), signature):
        return None
    decryptor = Cipher(algorithms.AES(keys[:32]), modes.CTR(keys[64:])).decryptor()
    padded = decryptor.update(data) + decryptor.finalize()
    unpadder = PKCS7(128).unpadder()
    return unpadder.update(padded) + unpadder.finalize()
