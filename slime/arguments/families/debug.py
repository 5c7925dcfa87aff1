"""Dumps, partial runs, profiling."""

from slime.arguments.flag import STORE_TRUE, Family, Flag, integer, number, text

FAMILY = Family(
    "Debugging",
    "Run one half of the loop, save and replay what crosses it, profile.",
    (
        Flag("--debug-rollout-only", action=STORE_TRUE, help="Generate, do not train."),
        Flag("--debug-train-only", action=STORE_TRUE, help="Train, start no engines."),
        Flag("--save-debug-rollout-data", text, help="Save samples to this path; {rollout_id} is filled in."),
        Flag(
            "--load-debug-rollout-data",
            text,
            help="Train on saved samples ({rollout_id} is filled in); implies --debug-train-only.",
        ),
        Flag(
            "--load-debug-rollout-data-subsample",
            number,
            help="Keep this fraction: half from the start, half from the end.",
        ),
        Flag(
            "--save-debug-train-data",
            text,
            help="Save train data to this path; {rollout_id} and {rank} are filled in.",
        ),
        Flag("--dump-details", text, help="Directory for both dumps."),
        Flag("--ci-test", action=STORE_TRUE, help="Check the exact zeros of the first step, and fail otherwise."),
        Flag("--ci-disable-kl-checker", action=STORE_TRUE, help="Leave KL to the reference out of that check."),
        Flag(
            "--use-pytorch-profiler",
            action=STORE_TRUE,
            help="Profile the first trainer rank; traces go to profile/ in the run directory.",
        ),
        Flag("--profile-step-start", integer, 10, "First rollout that is profiled."),
        Flag("--profile-step-end", integer, 12, "The rollout before which profiling ends."),
        Flag(
            "--profile-target",
            text,
            ["train_overall"],
            nargs="+",
            help="What the profiler covers: all of a rollout's training, or its optimizer steps and log-prob passes.",
            choices=("train_overall", "train_actor", "train_log_probs"),
        ),
        Flag(
            "--record-memory-history",
            action=STORE_TRUE,
            help="Record the trainers' allocations; a snapshot is written when memory runs out.",
        ),
        Flag("--memory-snapshot-dir", text, ".", "Directory of memory snapshots."),
        Flag("--memory-snapshot-num-steps", integer, help="Also write a snapshot after so many rollouts."),
        Flag(
            "--memory-recorder",
            text,
            "torch",
            "What records: torch the GPU's memory in snapshots, memray the host's until the last snapshot or the end.",
            choices=("torch", "memray"),
        ),
    ),
)
