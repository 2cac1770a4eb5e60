"""`millstream replay`: a run's steps made again offline, with its own settings or with others."""
