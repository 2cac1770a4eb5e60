"""Scripts for other interpreters than ours: each needs nothing of this project and prints one JSON object."""
