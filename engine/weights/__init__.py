"""Weights on their way from the trainer to the engines: their digest, their files, and how they travel."""
