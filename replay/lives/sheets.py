"""A life as a sheet."""

from __future__ import annotations

from replay.lives.facts import GroupLife, Life, SampleLife, StepLife, VersionLife
from replay.lives.sheet import Sheet
from replay.lives.sheets_samples import group_sheet, sample_sheet
from replay.lives.sheets_steps import step_sheet, version_sheet


def sheet_of(life: Life) -> Sheet:
    if isinstance(life, SampleLife):
        return sample_sheet(life)
    if isinstance(life, GroupLife):
        return group_sheet(life)
    if isinstance(life, StepLife):
        return step_sheet(life)
    assert isinstance(life, VersionLife)
    return version_sheet(life)
