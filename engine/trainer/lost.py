"""Groups whose outcome retention removed from `groups` before the trainer had read it.

The collector is done with them, so no record of them will come again; they would count as open for ever, and so many
fewer could be under way. With `log.on_lost = "continue"` the trainer drops them by name, with the reason `lost`.
"""

from __future__ import annotations

from consumers.ledger import Frontier
from consumers.runner import events_backwards, records_backwards, task_event
from streams.events import GroupCompleted, GroupDropped, GroupOf, TaskDispatched
from streams.log import EventLog
from streams.ranges import from_ranges
from streams.topics import Topics

LOST = "lost"


def lost_groups(log: EventLog, topics: Topics, partition: int, frontier: Frontier) -> dict[int, str]:
    """seq → group id of every group of the partition that the collector has closed, that the ledger has not, and of
    which no outcome lies in `groups` any more. Groups whose dispatch is gone too cannot be known."""
    outcomes = list(events_backwards(log, topics.name("groups"), partition))
    newest = next((event for event in outcomes if isinstance(event, GroupOf)), None)
    if newest is None:
        return {}
    kept = {event.seq for event in outcomes if isinstance(event, (GroupCompleted, GroupDropped))}
    closed_above = from_ranges(newest.closed_above)
    found: dict[int, str] = {}
    for record in records_backwards(log, topics.name("tasks"), partition):
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
