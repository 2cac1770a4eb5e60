"""A piece of a run's log in one file: `millstream export --slice` writes it, `millstream import` opens it."""
