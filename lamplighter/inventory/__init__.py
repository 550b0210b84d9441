"""What is WANTED: the inventory, with the file and line of every value. Pure: no network, no node."""

from lamplighter.inventory.inventory import Host, Inventory, load_inventory
from lamplighter.inventory.schema import (
    ConnectionSpec,
    EnvValue,
    Ignored,
    Server,
    Sitecustomize,
    Stale,
    Timeouts,
)
from lamplighter.inventory.secrets import SecretWord, require_secrets, resolve_secrets, secret_words
from lamplighter.inventory.values import Origin, SecretRef
from lamplighter.inventory.vault import Vault, password_sources

__all__ = [
    "ConnectionSpec",
    "EnvValue",
    "Host",
    "Ignored",
    "Inventory",
    "Origin",
    "SecretRef",
    "SecretWord",
    "Server",
    "Sitecustomize",
    "Stale",
    "Timeouts",
    "Vault",
    "load_inventory",
    "password_sources",
    "require_secrets",
    "resolve_secrets",
    "secret_words",
]
