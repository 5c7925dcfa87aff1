"""Dumps, partial runs, profiling."""

from slime.arguments import pending
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
            "--profile-target",
            text,
            ["train_overall"],
            nargs="+",
            help="What the profiler covers.",
            choices=("train_overall", "train_actor", "train_log_probs"),
            pending=pending.PROFILING,
        ),
        Flag("--record-memory-history", action=STORE_TRUE, help="Record allocations.", pending=pending.PROFILING),
        Flag("--memory-snapshot-dir", text, ".", "Directory of memory snapshots.", pending=pending.PROFILING),
        Flag("--memory-snapshot-num-steps", integer, help="Steps until a snapshot.", pending=pending.PROFILING),
        Flag(
            "--memory-recorder",
            text,
            "torch",
            "Recorder.",
            choices=("torch", "memray"),
            pending=pending.PROFILING,
        ),
    ),
)
