"""Metrics and trackers."""

from slime.arguments.flag import STORE_FALSE, STORE_TRUE, Family, Flag, function_path, text

FAMILY = Family(
    "Observability",
    "Metrics go to the console and to metrics.jsonl of the run directory, and to these.",
    (
        Flag("--use-tensorboard", action=STORE_TRUE, help="Write TensorBoard events."),
        Flag("--tb-project-name", text, help="Directory of the events. Default: TENSORBOARD_DIR, else the run's."),
        Flag("--tb-experiment-name", text, help="Name of the run in TensorBoard."),
        Flag("--use-wandb", action=STORE_TRUE, help="Log to Weights & Biases."),
        Flag("--wandb-mode", text, help="Mode.", choices=("online", "offline", "disabled")),
        Flag("--wandb-dir", text, help="Local directory. Default: the run's."),
        Flag("--wandb-key", text, help="API key; WANDB_API_KEY is the safer way.", secret=True),
        Flag("--wandb-host", text, help="Server."),
        Flag("--wandb-team", text, help="Entity."),
        Flag("--wandb-project", text, help="Project."),
        Flag("--wandb-group", text, help="Group."),
        Flag("--wandb-run-id", text, help="Run id, to continue a run."),
        Flag(
            "--disable-wandb-random-suffix",
            action=STORE_FALSE,
            dest="wandb_random_suffix",
            help="Run names without a random suffix.",
        ),
        Flag(
            "--wandb-always-use-train-step",
            action=STORE_TRUE,
            help="Optimizer steps are the x axis of all metrics.",
        ),
        Flag("--log-multi-turn", action=STORE_TRUE, help="Metrics multi_turn/*."),
        Flag("--log-passrate", action=STORE_TRUE, help="Metrics pass@k."),
        Flag("--log-reward-category", text, help="Key of dict rewards that gives metrics error_cat/*."),
        Flag("--log-correct-samples", action=STORE_TRUE, help="Metrics rollout/correct/* of samples with reward 1."),
        Flag(
            "--custom-rollout-log-function-path",
            function_path,
            help="fn(rollout_id, args, samples, extra_metrics, rollout_time) -> True to skip the built-in log.",
        ),
        Flag(
            "--custom-eval-rollout-log-function-path",
            function_path,
            help="fn(rollout_id, args, data, extra_metrics) -> True to skip the built-in log.",
        ),
    ),
)
