"""What ansible-core reads: run by its own Python. A request a line on stdin, an answer a line on stdout, both JSON.

Request: ``{"sources": [...], "patterns": [...]}``. Answer: hosts, the hosts of each group, of each host its connection
variables filled in, and of each pattern the hosts that it chooses, or null where Ansible refuses it. With ``values``,
names of variables of the first host: what each comes to as ``{"is": ...}``, or ``{"error": ...}``.
"""

from __future__ import annotations

import json
import sys

from ansible.errors import AnsibleError
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar
from ansible.utils.display import Display
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager

#: In the order in which Ansible takes them: the last one that is set counts.
CONNECTION = {
    "host": ("ansible_host", "ansible_ssh_host"),
    "port": ("ansible_port", "ansible_ssh_port"),
    "user": ("ansible_user", "ansible_ssh_user"),
    "key_file": ("ansible_private_key_file", "ansible_ssh_private_key_file"),
    "become": ("ansible_become",),
}


def main() -> None:
    init_plugin_loader([])
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answer(request["sources"], request["patterns"], request.get("values", []))), flush=True)


def answer(sources: list[str], patterns: list[str], values: list[str]) -> dict[str, object]:
    loader = DataLoader()
    inventory = InventoryManager(loader=loader, sources=sources)
    variables = VariableManager(loader=loader, inventory=inventory)
    return {
        "hosts": list(inventory.hosts),
        "groups": {name: [host.name for host in group.get_hosts()] for name, group in inventory.groups.items()},
        "connections": {name: connection(name, inventory, variables, loader) for name in inventory.hosts},
        "patterns": {pattern: chosen(inventory, pattern) for pattern in patterns},
        "values": filled(values, inventory, variables, loader) if values else {},
    }


def filled(
    names: list[str], inventory: InventoryManager, variables: VariableManager, loader: DataLoader
) -> dict[str, object]:
    known = variables.get_vars(host=next(iter(inventory.hosts.values())))
    known["hostvars"] = HostVars(inventory, variables, loader)
    templar = Templar(loader=loader, variables=known)
    found: dict[str, object] = {}
    for name in names:
        try:
            found[name] = {"is": json.loads(json.dumps(templar.template(known[name])))}
        except (AnsibleError, TypeError) as error:
            found[name] = {"error": str(error)}
    return found


def connection(
    name: str, inventory: InventoryManager, variables: VariableManager, loader: DataLoader
) -> dict[str, object]:
    known = variables.get_vars(host=inventory.get_host(name))
    templar = Templar(loader=loader, variables=known)
    found = {}
    for part, names in CONNECTION.items():
        given = [each for each in names if known.get(each) is not None]
        if given:
            found[part] = templar.template(known[given[-1]])
    return found


def chosen(inventory: InventoryManager, pattern: str) -> list[str] | None:
    try:
        return [host.name for host in inventory.get_hosts(pattern)]
    except AnsibleError:
        return None


if __name__ == "__main__":
    Display().warning = Display().deprecated = lambda *_, **__: None  # what we warn of is tested elsewhere
    main()
