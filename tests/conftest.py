"""Makes `tests.support` importable however pytest is started: helpers shared by tests, never by the product."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
