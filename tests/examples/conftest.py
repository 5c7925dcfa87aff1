"""The servers of the rollout tests."""

from tests.rollout.conftest import cluster_of, rollout_args

__all__ = ["cluster_of", "rollout_args"]
