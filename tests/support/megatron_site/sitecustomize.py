"""With this folder and the repository on PYTHONPATH, the trainer's processes of a run can use megatron on a CPU.

Python imports a module of this name when it starts. It looks at the command line, so that no other daemon changes.
"""

import sys


def is_of_trainer(words: list[str]) -> bool:
    return "engine.trainer.follower" in words or ("serve" in words and "trainer" in words)


if is_of_trainer(sys.orig_argv):
    from tests.support import megatron_cpu

    megatron_cpu.install()
