"""Which settings hold a secret, and how one is written: as where it is, never as what it is."""

from __future__ import annotations

import re

REDACTED = "<redacted>"
ENV_REFERENCE, FILE_REFERENCE = "env:", "file:"  # a secret is written as env:NAME or file:/path
_REFERENCE_TO = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/[^\x00-\x1f]+")
SECRET_NAME = re.compile(
    r"(^|_)(password|passwd|secret|credentials?|(api|access|secret|private)_?key|(api|auth|access|bearer)_?token)$",
    re.IGNORECASE,
)


def looks_secret(name: str) -> bool:
    """True for the name of an option that holds a secret, like `api_key` (and not `max_tokens`)."""
    return SECRET_NAME.search(name) is not None


def is_reference(value: str) -> bool:
    """True for `env:NAME` and `file:/path`: where a secret is, and not what it is."""
    return _REFERENCE_TO.fullmatch(value) is not None
