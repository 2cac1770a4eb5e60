"""The subcommands of `millstream`, one small module each.

A module says `NAME`, `HELP` (one line), `DESCRIPTION`, `EXAMPLE`, and has two functions: `add_arguments(parser)` and
`execute(args) -> int` (the exit code). It imports at its top only what `--help` needs; the rest inside `execute`.
"""
