"""Where a kernel of Triton is started: on the current device, wherever its arguments lie."""

from __future__ import annotations

import contextlib
from typing import Any


def current(device: Any) -> Any:
    """A context in which `device` (torch's) is the current one. In main memory (Triton's interpreter) there is none."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
