"""What happened: events folded into a report, and told to people and programs."""

from lamplighter.report.report import Fold, Report, ServerReport
from lamplighter.report.reporter import Reporter, reporter_for
from lamplighter.report.summary import summary
from lamplighter.report.tables import (
    check_text,
    config_text,
    difference_text,
    plan_text,
    releases_text,
    status_text,
    verify_text,
)

__all__ = [
    "Fold",
    "Report",
    "Reporter",
    "ServerReport",
    "check_text",
    "config_text",
    "difference_text",
    "plan_text",
    "releases_text",
    "reporter_for",
    "status_text",
    "summary",
    "verify_text",
]
