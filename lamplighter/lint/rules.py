"""All rules, and what they find: each is a short function over one immutable view of a server. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lamplighter.lint import flags, names, ownership, texts
from lamplighter.lint.view import Finding, Rule, View

FUNCTIONS: tuple[Rule, ...] = (
    names.misshapen, names.unknown_to_nccl, names.nearly_known, names.absent,
    texts.empty, texts.numbers, texts.p2p_switch, texts.words, texts.low_latency_128, texts.without_effect,
    texts.loopback, texts.left_as_text, texts.hidden_proof,
    ownership.owned, ownership.overwritten, ownership.proxies,
    flags.unknown, flags.speculation, flags.too_many_ranks, flags.said_twice, flags.secrets,
)  # fmt: skip

#: What each is about; docs/lint.md says more of them.
RULES: Mapping[str, str] = {
    "L1": "the name of a variable in another case",
    "L2": "a misspelt name of NCCL's",
    "L3": "a name that NCCL does not know",
    "L4": "a name that torch reads, not NCCL",
    "L5": "a name that is gone from NCCL",
    "L6": "no name of a variable",
    "L7": "a word where NCCL reads a number",
    "L8": "a number with something behind it",
    "L9": "a leading zero",
    "L10": "a number beyond 64 bits",
    "L11": "an empty value",
    "L12": "blanks around a value",
    "L13": "NCCL_P2P_DISABLE other than 0 or 1",
    "L14": "a word that is not taken",
    "L15": "LL128 by name",
    "L16": "a variable that another one makes void",
    "L17": "the loopback interface for several nodes",
    "L18": "a variable that is not ours to set",
    "L19": "a variable that must not be forced",
    "L20": "a value that the engine overwrites",
    "L21": "a value against a flag",
    "L22": "a value that the engine overwrites, unless forced",
    "L23": "a value against deterministic inference",
    "L24": "a value that the engine overwrites at import",
    "L25": "a value that batch invariance pins",
    "L26": "a proxy without an exception for the server itself",
    "L27": "a name that is nearly a known one",
    "L28": "a variable of another version of the engine",
    "L29": "a variable or a template left as text",
    "L30": "the lines of nccl_proof hidden",
    "L31": "a flag that is not known",
    "L32": "a flag of another version of the engine",
    "L33": "draft tokens that do not fit together",
    "L34": "more ranks than GPUs",
    "L35": "an argument against a setting",
    "L36": "a secret among the arguments",
    "L37": "an `ignore` that is wrong, or has nothing to ignore",
}


def inspect(view: View) -> list[Finding]:
    """Ask all rules."""
    return [finding for rule in FUNCTIONS for finding in rule(view)]
