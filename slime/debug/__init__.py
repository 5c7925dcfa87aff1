"""Commands over what `--save-debug-rollout-data`, `--save-debug-train-data` and `--dump-details` have written."""
