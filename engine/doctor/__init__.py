"""`millstream doctor`: what this machine, its accelerator, log and network can do, tried out rather than guessed.

    command ──► runner ──► one process a probe (child.py), with a deadline ──► Result ──► text, JSON, Markdown

Each probe is one function `Request → Result`, named in probes.py. Probes run in processes of their own, since what they
import may hang or end the process; the runner itself imports nothing heavy.
"""
