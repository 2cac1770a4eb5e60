"""Daemons on a Ray cluster. Ray itself is imported inside functions: it is an extra (`millstream[ray]`)."""
