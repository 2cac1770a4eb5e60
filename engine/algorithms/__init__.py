"""The mathematics of a training step: token log-probs, policy losses, and what is measured beside them."""
