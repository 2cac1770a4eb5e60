"""How old samples are when they train: what the log says of a run so far, and what another limit would have done."""
