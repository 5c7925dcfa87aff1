"""Evaluation."""

from slime.arguments.flag import STORE_TRUE, Family, Flag, function_path, integer, number, text

FAMILY = Family(
    "Evaluation",
    "Held-out data, evaluated every few rollouts. An unset value is the rollout's.",
    (
        Flag("--eval-interval", integer, help="Evaluate every N rollouts, and before the first."),
        Flag("--skip-eval-before-train", action=STORE_TRUE, help="No evaluation before the first rollout."),
        Flag("--eval-prompt-data", text, nargs="+", help="name path name path ... of the data sets."),
        Flag("--eval-config", text, help="YAML with defaults and datasets, instead of --eval-prompt-data."),
        Flag("--eval-function-path", function_path, help="Default: --rollout-function-path."),
        Flag("--eval-input-key", text, help="Column of the prompt."),
        Flag("--eval-label-key", text, help="Column of the label."),
        Flag("--eval-tool-key", text, help="Column of tool schemas."),
        Flag("--eval-reward-key", text, help="Key of a dict reward. Default: --reward-key."),
        Flag("--n-samples-per-eval-prompt", integer, 1, "Responses per prompt."),
        Flag("--eval-temperature", number, help="Sampling temperature; 0 is greedy."),
        Flag("--eval-top-p", number, help="Nucleus sampling."),
        Flag("--eval-top-k", integer, help="Top-k sampling."),
        Flag("--eval-max-prompt-len", integer, help="Drop prompts with more tokens than this."),
        Flag("--eval-max-response-len", integer, help="Longest response, in tokens."),
        Flag("--eval-max-context-len", integer, help="Longest prompt + response, in tokens."),
        Flag("--eval-min-new-tokens", integer, help="Shortest response, in tokens."),
    ),
)
