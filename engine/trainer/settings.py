"""What the trainer loop needs to know, apart from model and loss."""

from __future__ import annotations

import msgspec

from consumers.losses import OnLost


class LoopSettings(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    config_fingerprint: str
    seed: int
    rollout_batch_size: int  # groups of one step (G)
    n_samples_per_prompt: int
    max_weight_staleness: int  # versions
    on_stale: str  # "drop" | "mask"
    steps: int | None = None  # stop after this step; None: when the data ends
    last_batch: str = "train"  # "train" | "drop": a short batch at the end of the data
    update_weights_interval: int = 1  # versions
    checkpoint_every: int = 20  # steps
    checkpoint_keep_last: int = 3
    checkpoint_keep_every: int | None = None  # steps
    max_bad_steps: int = 3  # in a row
    num_steps_per_rollout: int = 1  # optimizer steps of one batch
    max_logprob_mismatch: float | None = (
        None  # nat per token, over which an engine is quarantined; None: measured only
    )
    on_lost: OnLost = "stop"  # groups that retention removed unread: fail, or drop them as `lost`
