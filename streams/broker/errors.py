"""Why there is no broker.

ConfigError             a folder or port was named that cannot be used (exit 2)
└── ToolMissing         Java or Maven is not on this machine, or too old
MillstreamError
└── BrokerFailed        downloading, formatting, starting or stopping went wrong (exit 1)
    └── PortTaken       another process has the port; picking another one helps
"""

from __future__ import annotations

from streams.errors import ConfigError, MillstreamError


class ToolMissing(ConfigError):
    """A program that the broker needs is not installed, or too old. The message says how to get it."""


class BrokerFailed(MillstreamError):
    """The broker could not be had, started or stopped. The message ends with what the failing program said last."""


class PortTaken(BrokerFailed):
    """Another process listens on a port of the broker."""
