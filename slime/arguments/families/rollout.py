"""Generation of samples."""

from slime.arguments import pending
from slime.arguments.flag import APPEND, STORE_TRUE, Family, Flag, function_path, integer, number, text

FAMILY = Family(
    "Rollout",
    "How responses are sampled, and the hooks into that.",
    (
        Flag("--num-rollout", integer, help="Rollout and train iterations; 0 with --eval-interval only evaluates."),
        Flag("--num-epoch", integer, help="Instead of --num-rollout: passes over the prompt data."),
        Flag("--start-rollout-id", integer, help="First rollout id. Default: the loaded one + 1."),
        Flag(
            "--rollout-function-path",
            function_path,
            "slime.rollout.sglang_rollout.generate_rollout",
            "Function of a whole rollout: fn(args, rollout_id, data_source, evaluation=False).",
        ),
        Flag(
            "--custom-generate-function-path",
            function_path,
            help="async fn(args, sample, sampling_params[, evaluation]) -> Sample or list of Samples.",
        ),
        Flag("--rollout-temperature", number, 1.0, "Sampling temperature; the trainer divides its logits by it too."),
        Flag("--rollout-top-p", number, 1.0, "Nucleus sampling."),
        Flag("--rollout-top-k", integer, -1, "Top-k sampling; -1: all tokens."),
        Flag("--rollout-max-context-len", integer, help="Longest prompt + response of a sample, in tokens."),
        Flag("--rollout-max-response-len", integer, 1024, "Longest response, in tokens."),
        Flag("--rollout-stop", text, nargs="+", help="Stop strings."),
        Flag("--rollout-stop-token-ids", integer, nargs="+", help="Stop token ids."),
        Flag("--rollout-skip-special-tokens", action=STORE_TRUE, help="Leave special tokens out of the text."),
        Flag("--partial-rollout", action=STORE_TRUE, help="Unfinished samples continue in the next rollout."),
        Flag(
            "--mask-offpolicy-in-partial-rollout",
            action=STORE_TRUE,
            help="Do not train on tokens that older weights generated.",
        ),
        Flag(
            "--over-sampling-batch-size",
            integer,
            help="Prompts submitted at a time, at least --rollout-batch-size. Default: the same.",
        ),
        Flag(
            "--dynamic-sampling-filter-path",
            function_path,
            help="fn(args, samples) -> DynamicFilterOutput or bool: keep this group?",
        ),
        Flag(
            "--buffer-filter-path",
            function_path,
            help="fn(args, rollout_id, buffer, num_samples) -> groups taken out of the buffer.",
        ),
        Flag(
            "--rollout-sample-filter-path",
            function_path,
            help="fn(args, groups): sets Sample.remove_sample.",
        ),
        Flag(
            "--rollout-all-samples-process-path",
            function_path,
            help="fn(args, groups, data_source): sees all samples, filtered ones too.",
        ),
        Flag(
            "--rollout-sample-hook-path",
            function_path,
            [],
            "hook(args, sample, *, rollout_id, evaluation), once per sample; may be given several times.",
            action=APPEND,
        ),
        Flag(
            "--custom-convert-samples-to-train-data-path",
            function_path,
            help="fn(args, samples) -> dict of train data, instead of the built-in conversion.",
        ),
        Flag(
            "--rollout-data-postprocess-path",
            function_path,
            help="fn(args, rollout_id, rollout_data), after log-probs and advantages.",
        ),
        Flag(
            "--rollout-data-transport",
            text,
            "object-store",
            "How train data travels to the trainers.",
            choices=("object-store", "nixl"),
            pending_choices={"nixl": pending.NIXL},
        ),
        Flag(
            "--max-weight-staleness",
            integer,
            help="Oldest weights that a token may come from when it is trained on, in versions behind. Holds prompts "
            "back; nothing that was generated is thrown away.",
        ),
    ),
)
