"""Starting and supervising the daemons of a run. No torch here: the daemons load what they need."""
