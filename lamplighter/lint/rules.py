"""All rules, and what they find: each is a short function over one immutable view of a server. Pure."""

from __future__ import annotations

from lamplighter.lint import flags, names, ownership, texts
from lamplighter.lint.view import Finding, Rule, View

FUNCTIONS: tuple[Rule, ...] = (
    names.misshapen, names.unknown_to_nccl, names.nearly_known, names.absent,
    texts.empty, texts.numbers, texts.p2p_switch, texts.words, texts.low_latency_128, texts.without_effect,
    texts.loopback, texts.left_as_text, texts.hidden_proof,
    ownership.owned, ownership.overwritten, ownership.proxies,
    flags.unknown, flags.speculation, flags.too_many_ranks, flags.said_twice, flags.secrets,
)  # fmt: skip


def inspect(view: View) -> list[Finding]:
    """Ask all rules."""
    return [finding for rule in FUNCTIONS for finding in rule(view)]
