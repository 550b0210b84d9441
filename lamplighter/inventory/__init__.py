"""What is WANTED: the inventory, with the file and line of every value. Pure: no network, no node."""

from lamplighter.inventory.inventory import Host, Inventory, load_inventory
from lamplighter.inventory.schema import (
    ConnectionSpec,
    EnvValue,
    Server,
    Sitecustomize,
    Stale,
    Timeouts,
    resolve_secrets,
)
from lamplighter.inventory.values import Origin, SecretRef

__all__ = [
    "ConnectionSpec",
    "EnvValue",
    "Host",
    "Inventory",
    "Origin",
    "SecretRef",
    "Server",
    "Sitecustomize",
    "Stale",
    "Timeouts",
    "load_inventory",
    "resolve_secrets",
]
