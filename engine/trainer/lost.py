"""Groups whose outcome is gone from `groups`, removed or damaged, before the trainer had read it.

The collector is done with them, so no record of them will come again; they would count as open for ever, and so many
fewer could be under way. With `log.on_lost = "continue"` the trainer drops them by name, with the reason `lost`.
"""

from __future__ import annotations

from collections.abc import Collection

from consumers.ledger import Frontier
from consumers.losses import Losses
from consumers.runner import records_backwards, task_event
from streams import codec
from streams.codec import Known
from streams.errors import CodecError
from streams.events import GroupCompleted, GroupDropped, GroupOf, TaskDispatched
from streams.log import EventLog, Record
from streams.ranges import from_ranges
from streams.topics import Topics

LOST = "lost"


def lost_groups(
    log: EventLog,
    topics: Topics,
    partition: int,
    frontier: Frontier,
    losses: Losses,
    *,
    read_to: int,
    waiting: Collection[int] = (),
) -> dict[int, str]:
    """seq → group id of every group of the partition that the collector has closed, that the ledger has not, and of
    which no outcome lies in `groups` any more.

    Of the outcomes below `read_to`, those that are in the log were read: they are in the ledger or `waiting` (seqs).
    Groups whose dispatch is gone too cannot be known
    here: the feeder dispatches them anew.
    """
    newest: GroupOf | None = None
    kept: set[int] = set(waiting)  # holds what is open alone, however long the partition is
    for record in records_backwards(log, topics.name("groups"), partition, losses):
        event = _group_event(record)
        if newest is None and isinstance(event, GroupOf):
            newest = event
        if isinstance(event, (GroupCompleted, GroupDropped)) and event.seq not in frontier:
            kept.add(event.seq)
        if newest is not None and record.offset <= read_to:
            break
    if newest is None:
        return {}
    closed_above = from_ranges(newest.closed_above)
    found: dict[int, str] = {}
    for record in records_backwards(log, topics.name("tasks"), partition, losses):
        event = task_event(record)
        if event is None:
            continue
        is_closed = record.offset < newest.frontier or record.offset in closed_above
        is_first = not isinstance(event, TaskDispatched) or event.first_offset < 0
        if is_closed and is_first and event.seq not in kept and event.seq not in frontier:
            found[event.seq] = event.group_id
        if event.next_seq <= frontier.low:
            break
    return dict(sorted(found.items()))


def _group_event(record: Record) -> object:
    try:
        decoded = codec.decode(record)
    except CodecError:
        return None
    return decoded.event if isinstance(decoded, Known) else None
