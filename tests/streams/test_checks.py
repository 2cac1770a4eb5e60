"""What every log refuses, and what it says of it, without any log."""

from __future__ import annotations

from streams.checks import no_such


def test_of_many_topics_an_error_names_those_of_the_same_run_and_few_others():
    topics = {f"other{i:03}.tasks": 1 for i in range(2000)} | {"run.tasks": 2, "run.ledger": 1}
    said = str(no_such("run.rewards", 0, topics))
    assert said.startswith("no topic 'run.rewards'; this log has: run.ledger, run.tasks, other000.tasks, ")
    assert said.endswith("other013.tasks and 1986 more")


def test_a_log_of_few_topics_is_told_whole():
    assert str(no_such("c", 0, {"b": 1, "a": 1})) == "no topic 'c'; this log has: a, b"
    assert str(no_such("c", 0, {})) == "no topic 'c'; this log has: none"
    assert str(no_such("a", 3, {"a": 2})) == "topic 'a' has partitions 0 to 1, not 3"
