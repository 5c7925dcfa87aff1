"""Corrections of what the rollout's policy and the trained one differ in."""

from slime.arguments.flag import STORE_TRUE, Family, Flag, function_path, number, text

FAMILY = Family(
    "Off-policy corrections",
    "Weights and masks for tokens whose probability differs between engine and trainer, or that are stale.",
    (
        Flag("--use-tis", action=STORE_TRUE, help="Truncated importance sampling: weigh tokens by train / rollout."),
        Flag("--tis-clip", number, 2.0, "Upper bound of the weight."),
        Flag("--tis-clip-low", number, 0.0, "Lower bound of the weight."),
        Flag(
            "--custom-tis-function-path",
            function_path,
            help="Replaces TIS. Built in: slime.backends.megatron_utils.loss.icepop_function (IcePop) and "
            "slime.training.mis.mis_function (MIS).",
        ),
        Flag(
            "--get-mismatch-metrics",
            action=STORE_TRUE,
            help="Metrics of the train/rollout mismatch (those of the correction) without a correction.",
        ),
        Flag(
            "--mis-level",
            text,
            "token",
            "MIS: ratio of each token, of the sequence (product) or its geometric mean.",
            choices=("token", "sequence", "geometric"),
        ),
        Flag(
            "--mis-mode",
            text,
            "truncate",
            "MIS: bound the weight above, on both sides, or mask what is outside.",
            choices=("truncate", "clip", "mask"),
        ),
        Flag("--mis-upper-bound", number, 2.0, "MIS: upper bound of the ratio."),
        Flag("--mis-lower-bound", number, 0.5, "MIS: lower bound of the ratio, for the modes clip and mask."),
        Flag(
            "--mis-veto-threshold",
            number,
            help="MIS: drop a sequence with any token whose ratio is below. Default: never.",
        ),
        Flag(
            "--use-rollout-top-p-replay",
            action=STORE_TRUE,
            help="Log-probs, in engine and trainer, over the tokens that --rollout-top-p (top-k) left to sample from.",
        ),
        Flag("--use-opsm", action=STORE_TRUE, help="Off-policy sequence masking (DeepSeek-V3.2)."),
        Flag("--opsm-delta", number, 1e-4, "OPSM: mean of old - current log-prob from which a sequence is dropped."),
        Flag(
            "--custom-pg-loss-reducer-function-path",
            function_path,
            help="fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer of pg_loss.",
        ),
    ),
)
