"""How far generation may run ahead of training, from the ledger alone: the arithmetic of the feeder's admission.

    open groups in batches of B:   batch 0      batch 1      batch 2     …
    cut at the version:            published    published+1  published+2      (if nothing before them is dropped)
    cut in the step:               next_step()  +1           +2

A group of batch n that is generated now is n versions old at its cut, so it may go out while n ≤ the limit of that
step. A change of the limit that waits counts from its own step on: nothing goes out for a step at which a lower limit
would refuse it, and the groups of the first steps under a higher one go out in time.
"""

from __future__ import annotations

from consumers.ledger import Ledger


def next_step(ledger: Ledger) -> int:
    """The step that starts from the published version."""
    return ledger.step - ledger.untrained_steps + 1


def batches_allowed(ledger: Ledger) -> int:
    """How many batches of groups may be open. Without a change of the limit that waits: limit + 1."""
    allowed, waiting = ledger.limit + 1, ledger.waiting_limit
    if waiting is None:
        return allowed
    before = waiting.from_step - next_step(ledger)  # batches that are cut before it binds; at least 1
    return allowed if allowed < before else max(before, waiting.limit + 1)


def least_version(ledger: Ledger, batch: int) -> int:
    """The least version whose tokens will still be in the limit when this batch is cut, or earlier.

    Admission keeps it at or below what is published, so nothing can hang on it. (Published - limit alone would let an
    engine start on weights that are one version too old, in the moment between a publication and its loading.) When
    groups before it are dropped a group is cut earlier, and that may be under the lower limit of before a change.
    """
    published, waiting, first = newest_version(ledger), ledger.waiting_limit, next_step(ledger)
    batches = [batch]
    if waiting is not None and first < waiting.from_step <= first + batch:
        batches.append(waiting.from_step - 1 - first)  # the last one before the change
    least = max(published + each - ledger.limit_at(first + each) for each in batches)
    return max(0, min(published, least))


def newest_version(ledger: Ledger) -> int:
    """The newest published one; 0 before the first."""
    return ledger.published.version if ledger.published is not None else 0
