"""Generation: tasks in, trajectories out.

    worker.py      the rollout daemon: reads tasks, keeps samples in flight, follows the weights
    intake.py      its reading thread: ledger, tasks, recovery
    outcomes.py    what a sample ends in: a trajectory, or a typed failure
    publisher.py   its writing thread: trajectories, failures, dead letters, fleet
    watch.py       keeps the engine at the newest published version (loading.py reads and verifies it)
    episode.py     the tokens of one sample, with their log-probs, mask and versions
    generate.py    generate functions: single_turn, multi_turn, guess
    foreign.py     generate functions written for Miles or Slime
    scripted.py    engine with fixed answers (no torch)
    batched.py     engine: plain batches on torch, for small models
    continuous.py  engine: transformers' continuous batching

Only batched.py and continuous.py (with the torch_*.py files that they share) import torch.
"""
