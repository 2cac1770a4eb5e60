"""How tests are shared out among the workers of pytest-xdist (`pytest -n 2 --dist loadfile`).

A file is one worker's, so that what its tests share is made once. Files that may need a real SGLang server, by their
path, are together one worker's: a server costs 2 GB and half a minute, and two of them more than a machine has. So are
those of tests/launch/ray, which share a Ray cluster.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

SGLANG = "sglang"
RAY = "/launch/ray/"


class OneServer(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scope_of(nodeid: str) -> str:
    """
    >>> scope_of("tests/streams/test_codec.py::test_x[a::b]")
    'tests/streams/test_codec.py'
    >>> scope_of("tests/engine/sglang/test_client.py::test_x"), scope_of("tests/end_to_end/test_sglang_run.py::test_y")
    ('sglang', 'sglang')
    """
    file = nodeid.partition("::")[0]
    return next((costly for costly in (SGLANG, RAY) if costly in file), file)
