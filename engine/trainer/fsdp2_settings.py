"""What the fsdp2 trainer needs to know beside the settings of every trainer. No torch here."""

from __future__ import annotations

import msgspec


class Fsdp2Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names as in the configuration's section `trainer.fsdp2`."""

    reshard_after_forward: bool = (
        True  # a layer's full weights are dropped between its forward and its backward
    )
    activation_checkpointing: bool = False  # a layer's activations are computed again in the backward
    cpu_offload: bool = (
        False  # weights, gradients and optimizer lie in main memory, and come a layer at a time
    )
    sync_each_micro_batch: bool = True  # False: gradients are summed, and layers dropped, once a minibatch
