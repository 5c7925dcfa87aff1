"""Backend-independent training: schedule, rollout data, log-probs, advantages, losses.

`schedule`, `rollout_data` and `rewards` are importable without torch, for the rollout manager.
"""
