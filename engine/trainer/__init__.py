"""What makes new weights from a batch (backends), and what stores the state between steps (checkpoints)."""
