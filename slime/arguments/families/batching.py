"""Samples per rollout, per optimizer step and per micro-batch."""

from slime.arguments.flag import STORE_TRUE, Family, Flag, integer

FAMILY = Family(
    "Batching",
    "One rollout has rollout-batch-size x n-samples-per-prompt samples, cut into steps of global-batch-size.",
    (
        Flag("--rollout-batch-size", integer, help="Prompts per rollout. Required."),
        Flag("--n-samples-per-prompt", integer, 1, "Responses per prompt (the group size)."),
        Flag(
            "--global-batch-size",
            integer,
            help="Samples per optimizer step. Default: from --num-steps-per-rollout, else the whole rollout.",
        ),
        Flag("--num-steps-per-rollout", integer, help="Optimizer steps per rollout; fixes --global-batch-size."),
        Flag("--micro-batch-size", integer, 1, "Samples per micro-batch, without --use-dynamic-batch-size."),
        Flag(
            "--use-dynamic-batch-size",
            action=STORE_TRUE,
            help="Pack micro-batches up to --max-tokens-per-gpu instead of a fixed count.",
        ),
        Flag(
            "--max-tokens-per-gpu",
            integer,
            help="Strict token cap of a micro-batch; one longer sample makes a micro-batch of its own.",
            aliases=("--fsdp-max-tokens-per-gpu",),
        ),
        Flag(
            "--log-probs-max-tokens-per-gpu",
            integer,
            help="The same for log-prob passes. They share the micro-batches of training, which makes the first "
            "step exact, so only the value of --max-tokens-per-gpu is accepted.",
        ),
        Flag("--balance-data", action=STORE_TRUE, help="Balance tokens over data-parallel ranks."),
        Flag(
            "--balance-by-flops",
            action=STORE_TRUE,
            help="Balance FLOPs of the model over ranks and micro-batches, not tokens: worth it with long samples.",
        ),
        Flag("--disable-rollout-trim-samples", action=STORE_TRUE, help="Keep samples beyond a multiple of the batch."),
        Flag(
            "--use-dynamic-global-batch-size",
            action=STORE_TRUE,
            help="The global batch size follows the number of samples: none is trimmed, and the rollout is cut into "
            "the same number of optimizer steps.",
        ),
    ),
)
