"""Stages that add to a sample what a reward is not: a teacher's log-probs."""
