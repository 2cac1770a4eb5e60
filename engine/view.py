"""Watching a run: the live terminal view, or plain lines, while the launcher works.

    launcher.poll() ◄── watch() ──► RunProgress.catch_up() (reads the log, read-only) ──► Live view | log lines

The view reads what anyone may read; nothing of the run depends on it. It goes to stderr, as logs do.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from engine.commands import common
from engine.launch.supervisor import Outcome, Supervisor
from engine.settings import Config
from replay.progress import RunProgress
from streams.errors import LogUnavailable

logger = logging.getLogger(__name__)

POLL_S = 0.1
DRAW_EVERY_S = 0.5
SAY_EVERY_S = 5.0  # plain lines
LOOK_S = 5.0  # for one look into a log that may not answer
SILENT_EVERY_S = 10.0  # and from one such look to the next
RECENT_STEPS = 20  # over which staleness and speed are shown
FRUITLESS_BATCHES = 4  # so many batches of dropped groups without one step are worth a warning
TOPIC_OF_REASON = (("task_", "groups"), ("reward_", "rewards"), ("rollout_", "trajectories"))
PLOT_WIDTH, PLOT_HEIGHT = 60, 10
BLOCKS = " ▁▂▃▄▅▆▇█"


def watch(
    launcher: Supervisor, config: Config, stop: Callable[[], bool], *, plain: bool, title: str = ""
) -> Outcome:
    """Supervise a run to its end with something to look at; everything is ended when this returns."""
    show = _Plain(config) if plain or not sys.stderr.isatty() else _Terminal(config, title or config.run.name)
    try:
        if not launcher.start(stop):
            return Outcome(130, "interrupted")
        show.stop = stop
        with show:
            while True:
                outcome = launcher.poll()
                show.update(done=outcome is not None)
                if outcome is not None:
                    return outcome
                if stop():
                    return Outcome(130, "interrupted")
                time.sleep(POLL_S)
    finally:
        launcher.close()


class _Follower:
    """Progress of a run whose log may not be there yet."""

    def __init__(self, config: Config, every_s: float) -> None:
        self._config, self._every_s = config, every_s
        self._progress: RunProgress | None = None
        self._log = None
        self._due = 0.0
        self._warned = False
        self.stop: Callable[[], bool] = lambda: False
        self._give_up_at = 0.0  # when this look has taken long enough
        self._is_silent = False  # the log does not answer

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()

    def update(self, *, done: bool) -> None:
        """Look at the log and show it, when it is time to."""
        now = time.monotonic()
        if now < self._due and not done:
            return
        self._give_up_at = now + LOOK_S
        try:
            self._look()
        except LogUnavailable as error:
            self._say_silent(error)
        else:
            self._is_silent = False
            self._due = time.monotonic() + self._every_s

    def _look(self) -> None:
        progress = self._follow()
        if progress is not None:
            progress.catch_up()
            self._warn_once(progress)
            self.show(progress)

    def _say_silent(self, error: LogUnavailable) -> None:
        """The daemons wait for it by themselves; looking less often, the supervisor has its time for them."""
        if not self._is_silent:
            logger.warning("the log does not answer within %g s, so the view stands still: %s", LOOK_S, error)
        self._is_silent = True
        self._due = time.monotonic() + SILENT_EVERY_S

    def _is_enough(self) -> bool:
        return self.stop() or time.monotonic() > self._give_up_at

    def _warn_once(self, progress: RunProgress) -> None:
        """A run that drops all it makes would go on for ever, and looks busy."""
        advice = "" if self._warned else fruitless(progress, self._config)
        if advice:
            self._warned = True
            logger.warning("%s", advice)

    def _follow(self) -> RunProgress | None:
        if self._progress is None:
            topics = common.topics_of(self._config)
            if not common.has_log(self._config):
                return None
            self._log = self._log or common.open_for_reading(self._config, interrupted=self._is_enough)
            if not self._log.partitions(topics.name("ledger")):
                self._log.close()
                self._log = None
                return None
            self._progress = RunProgress(self._log, topics)
        return self._progress

    def show(self, progress: RunProgress) -> None:
        raise NotImplementedError


class _Plain(_Follower):
    """A log line now and then, when something has changed."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, SAY_EVERY_S)
        self._said = ""

    def show(self, progress: RunProgress) -> None:
        line = status_line(progress, self._config)
        if line != self._said:
            logger.info("%s", line)
            self._said = line


class _Terminal(_Follower):
    """A panel that is drawn again and again; log lines scroll above it."""

    def __init__(self, config: Config, title: str) -> None:
        super().__init__(config, DRAW_EVERY_S)
        self._title = title
        self._console = Console(stderr=True)
        self._live = Live(Text("starting the daemons …"), console=self._console, auto_refresh=False)
        self._handlers: list[logging.Handler] = []

    def __enter__(self):
        root = logging.getLogger()
        self._handlers, root.handlers = root.handlers, [RichHandler(console=self._console, show_path=False)]
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        logging.getLogger().handlers = self._handlers
        super().__exit__()

    def show(self, progress: RunProgress) -> None:
        self._live.update(panel(progress, self._config, self._title), refresh=True)


# ---------------------------------------------------------------- what is shown
def status_line(progress: RunProgress, config: Config) -> str:
    """One line that says where the run is."""
    view = progress.view
    parts = [
        f"step {view.step}" + (f"/{config.run.steps}" if config.run.steps else ""),
        f"version {view.version}",
    ]
    if progress.steps:
        parts.append(f"reward {_recent(progress, 'reward_mean'):.3f}")
    if progress.evaluations:
        parts.append(f"held-out {progress.evaluations[-1].reward:.3f}")
    ages = staleness(progress)
    if ages:
        parts.append(f"staleness {min(ages)}..{max(ages)}")
    parts.append(f"{tokens_per_s(progress):.0f} tokens/s")
    parts.append("waiting " + " ".join(f"{stage}:{count}" for stage, count in progress.queues().items()))
    dropped = drops(progress)
    if dropped:
        parts.append("dropped " + " ".join(f"{reason}:{count}" for reason, count in sorted(dropped.items())))
    parts.append(f"busy trainer {_share(_recent(progress, 'busy'))} engine {_share(engine_busy(progress))}")
    return ", ".join(parts)


def fruitless(progress: RunProgress, config: Config) -> str:
    """What to say of a run that drops every group that it makes; empty as long as it may be well."""
    dropped = drops(progress)
    n_groups, batch = sum(dropped.values()), config.trainer.rollout_batch_size
    if progress.view.step or n_groups < FRUITLESS_BATCHES * batch:
        return ""
    reason, count = max(dropped.items(), key=lambda each: each[1])
    topic = next((topic for start, topic in TOPIC_OF_REASON if reason.startswith(start)), "groups")
    return (
        f"no batch of {batch} groups has come together, and {n_groups} groups were dropped, {count} of them for "
        f"{reason}; why: millstream tail {config.run.dir} {topic} -o -3 -e"
    )


def panel(progress: RunProgress, config: Config, title: str) -> RenderableType:
    view = progress.view
    of_steps = f"/{config.run.steps}" if config.run.steps else ""
    head = f"{title} · step {view.step}{of_steps} · version {view.version} · {_clock(progress.training_s)}"
    return Panel(
        Group(_curve(progress), Columns([_speed(progress), _ages(progress, config), _queues(progress)])),
        title=head,
    )


def _curve(progress: RunProgress) -> RenderableType:
    held_out = [each.reward for each in progress.evaluations]
    training = [each.values["reward_mean"] for each in progress.steps if "reward_mean" in each.values]
    main, name = (held_out, "held-out reward") if held_out else (training, "reward")
    if not main:
        return Text("no step yet")
    top = f"{max(1.0, *main):.3g}"
    margins = [f"{top:>4} ", *["     "] * (PLOT_HEIGHT - 2), "   0 "]
    lines = [
        Text(margin).append(row, style="green")
        for margin, row in zip(margins, plot(main, PLOT_WIDTH, PLOT_HEIGHT), strict=True)
    ]
    lines.append(Text(f"{name} {main[-1]:.3f} (first {main[0]:.3f})", style="bold"))
    if held_out and training:
        lines.append(
            Text(f"training reward {training[-1]:.3f}  {sparkline(training, PLOT_WIDTH - 24)}", style="dim")
        )
    return Group(*lines)


def _speed(progress: RunProgress) -> Table:
    table = _table("speed")
    table.add_row("tokens/s", f"{tokens_per_s(progress):.0f}")
    table.add_row("trainer busy", _share(_recent(progress, "busy")))
    table.add_row("engine busy", _share(engine_busy(progress)))
    for name, engine in sorted(progress.engines.items()):
        table.add_row(f"{name} at", f"v{engine.version}")
    return table


def _ages(progress: RunProgress, config: Config) -> Table:
    counts = staleness(progress)
    total = sum(counts.values())
    table = _table(f"staleness (limit {_limit(progress, config)})")
    for age in range(max([*counts, _limit(progress, config)]) + 1):
        share = counts[age] / total if total else 0.0
        table.add_row(str(age), f"{'█' * round(10 * share):<10} {share:4.0%}")
    return table


def _queues(progress: RunProgress) -> Table:
    table = _table("waiting")
    for stage, count in progress.queues().items():
        table.add_row(f"for {stage}", str(count))
    feeder = progress.latest.get("feeder")
    if feeder is not None:
        table.add_row("open groups", f"{feeder.values.get('open_groups', 0):.0f}")
    for reason, count in sorted(drops(progress).items()):
        table.add_row(f"dropped {reason}", str(count))
    return table


def _table(title: str) -> Table:
    table = Table(
        title=title, show_header=False, box=None, title_justify="left", title_style="bold", padding=(0, 1)
    )
    table.add_column()
    table.add_column(justify="right")
    return table


# ---------------------------------------------------------------- numbers
def staleness(progress: RunProgress) -> Counter[int]:
    """Age → samples, over the newest steps."""
    cuts = progress.view.cuts[-RECENT_STEPS:]
    members = (member for cut in cuts for group in cut.event.groups for member in group.members)
    return Counter(member.staleness for member in members if member.staleness >= 0)


def drops(progress: RunProgress) -> Counter[str]:
    return Counter(each.drop.reason for each in progress.view.drops)


def tokens_per_s(progress: RunProgress) -> float:
    return progress.tokens_generated / progress.training_s if progress.training_s else 0.0


def engine_busy(progress: RunProgress) -> float:
    newest = [engine.busy[-1][1] for engine in progress.engines.values() if engine.busy]
    return sum(newest) / len(newest) if newest else 0.0


def _limit(progress: RunProgress, config: Config) -> int:
    cuts = progress.view.cuts
    return cuts[-1].event.limit if cuts else config.staleness.max_weight_staleness


def _recent(progress: RunProgress, name: str) -> float:
    values = [each.values[name] for each in progress.steps[-5:] if name in each.values]
    return sum(values) / len(values) if values else 0.0


def _share(value: float) -> str:
    return f"{value:.0%}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


# ---------------------------------------------------------------- characters
def sparkline(values: Sequence[float], width: int) -> str:
    """The values from 0 to 1 (or to their maximum, if that is more) in one row of blocks."""
    return plot(values, width, 1)[0]


def plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """Columns of blocks, top row first: the mean of each of at most `width` stretches, scaled from 0 to 1 (or to
    the largest value, if that is more).

    >>> plot([0.0, 0.5, 1.0], 3, 2)
    ['  █', ' ██']
    """
    columns = _stretches(values, width)
    top = max(1.0, *columns)
    levels = [max(0, round(value / top * height * 8)) for value in columns]
    return [
        "".join(BLOCKS[min(8, max(0, level - 8 * row))] for level in levels)
        for row in range(height - 1, -1, -1)
    ]


def _stretches(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(at * len(values) / width) for at in range(width + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
