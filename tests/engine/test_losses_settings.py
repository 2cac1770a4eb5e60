"""From the file to the trainer: every setting of the loss arrives, and a changed one is another run's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import roles
from engine.config import build_config, fingerprint
from engine.settings import TrainerConfig
from engine.trainer.torch_settings import TorchSettings

LEAST: dict[str, Any] = {
    "data": {"path": "/prompts.jsonl"},
    "model": {"path": "/model"},
    "reward": {"function": "exact"},
}
# none of them the default, and all of them allowed together
OTHER: dict[str, Any] = {
    "loss": "decoupled_ppo",
    "eps_clip": 0.1,
    "eps_clip_high": 0.3,
    "eps_clip_c": 4.0,
    "proximal_policy": "interpolated",
    "tis_clip": 7.0,
    "tis_clip_low": 0.5,
    "tis_mode": "mask",
    "tis_level": "sequence",
    "tis_veto": 1e-5,
    "use_opsm": True,
    "opsm_delta": 0.2,
    "loss_aggregation": "constant",
    "loss_constant_length": 77,
    "kl_loss_coef": 0.3,
    "kl_loss_type": "low_var_kl",
    "use_unbiased_kl": True,
    "ref_model": "/reference",
    "entropy_coef": 0.01,
}


def made_with(monkeypatch: pytest.MonkeyPatch, **trainer: Any) -> TorchSettings:
    seen: list[TorchSettings] = []

    def record(folder: Path, settings: TorchSettings) -> None:
        seen.append(settings)

    monkeypatch.setattr("engine.trainer.torch_backend.TorchBackend", record)
    roles.trainer_backend(build_config({**LEAST, "trainer": trainer}))
    return seen[0]


def test_every_setting_of_the_loss_arrives_at_the_trainer(monkeypatch: pytest.MonkeyPatch):
    defaults = {field.name: field.default for field in msgspec.structs.fields(TrainerConfig)}
    assert all(defaults[name] != value for name, value in OTHER.items())
    settings = made_with(monkeypatch, **OTHER)
    assert {name: getattr(settings, name) for name in OTHER} == OTHER


def test_a_constant_length_is_that_of_the_longest_response_unless_it_is_set(monkeypatch: pytest.MonkeyPatch):
    assert made_with(monkeypatch, loss_aggregation="constant").loss_constant_length == 1024


def test_later_settings_change_the_fingerprint_only_where_they_are_used():
    """Each of them alone in another state than all together, since many go with others only."""
    whole = fingerprint(build_config({**LEAST, "trainer": OTHER}))
    assert whole != fingerprint(build_config(LEAST))
    needed = {"loss", "use_opsm", "kl_loss_coef", "loss_aggregation"}  # by others among them
    for name in OTHER.keys() - needed:
        without = {other: value for other, value in OTHER.items() if other != name}
        assert fingerprint(build_config({**LEAST, "trainer": without})) != whole, name
