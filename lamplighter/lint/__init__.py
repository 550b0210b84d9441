"""What is wrong with the variables and arguments of a server, before any node is asked. Pure: reads the roles."""

from lamplighter.lint.knowledge import About, Knowledge, load_knowledge, load_rules
from lamplighter.lint.rules import inspect
from lamplighter.lint.servers import lint_of_node, lint_servers
from lamplighter.lint.view import Entry, Finding, View

__all__ = [
    "About",
    "Entry",
    "Finding",
    "Knowledge",
    "View",
    "inspect",
    "lint_of_node",
    "lint_servers",
    "load_knowledge",
    "load_rules",
]
