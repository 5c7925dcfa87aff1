"""Context-parallel helpers under the names that users import; they live in `slime.training`."""

from slime.training.context_parallel import all_gather_with_cp, slice_log_prob_with_cp
from slime.training.reducers import get_sum_of_sample_mean

__all__ = ["all_gather_with_cp", "get_sum_of_sample_mean", "slice_log_prob_with_cp"]
