"""`millstream why`: the first process of a run that failed, with its own traceback, and what followed from it."""
