"""What is wrong with the variables and arguments of a server, before any node is asked. Pure: reads the roles."""

from lamplighter.lint.knowledge import Knowledge, load_knowledge
from lamplighter.lint.rules import RULES, Finding, inspect
from lamplighter.lint.servers import lint_servers
from lamplighter.lint.view import Entry, View

__all__ = ["RULES", "Entry", "Finding", "Knowledge", "View", "inspect", "lint_servers", "load_knowledge"]
