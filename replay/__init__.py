"""Reading a run without touching it: ledger, recovery folds, tail, audits, replays and exports."""
