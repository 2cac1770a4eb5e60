"""The picture of a run: rewards over steps, as a PNG."""

from __future__ import annotations

from pathlib import Path

from replay.progress import RunProgress


def write_curve(progress: RunProgress, path: Path, title: str) -> None:
    """Training reward of each step and held-out reward of each evaluated version. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    training = [
        (each.step, each.values["reward_mean"]) for each in progress.steps if "reward_mean" in each.values
    ]
    held_out = [(each.version, each.reward) for each in progress.evaluations]
    if training:
        axes.plot(*zip(*training, strict=True), color="0.7", linewidth=1, label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="tab:blue", marker=".", label="held-out")
    axes.set(title=title, xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    if training or held_out:
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
