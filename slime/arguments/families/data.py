"""Prompt data."""

from slime.arguments import pending
from slime.arguments.flag import (
    STORE_FALSE,
    STORE_TRUE,
    Family,
    Flag,
    function_path,
    integer,
    json_object,
    number,
    text,
)

FAMILY = Family(
    "Data",
    "Prompts: a .jsonl or .parquet file, one row per prompt.",
    (
        Flag("--prompt-data", text, help="Path of the prompts; an optional suffix @[a:b] takes a slice of rows."),
        Flag("--input-key", text, "input", "Column of the prompt: text, or a message list."),
        Flag("--label-key", text, help="Column of the label."),
        Flag("--metadata-key", text, "metadata", "Column that becomes Sample.metadata."),
        Flag("--tool-key", text, help="Column of tool schemas for the chat template."),
        Flag(
            "--multimodal-keys",
            json_object,
            help="JSON object {media type: column}.",
            pending=pending.MULTIMODAL,
        ),
        Flag("--apply-chat-template", action=STORE_TRUE, help="Render message lists with the chat template."),
        Flag("--apply-chat-template-kwargs", json_object, {}, "JSON object of arguments for the chat template."),
        Flag("--rollout-max-prompt-len", integer, help="Drop prompts with more tokens than this."),
        Flag("--rollout-shuffle", action=STORE_TRUE, help="Shuffle the prompts in each epoch."),
        Flag("--rollout-seed", integer, 42, "Seed of the shuffle, and base of the sampling seeds."),
        Flag(
            "--disable-rollout-global-dataset",
            action=STORE_FALSE,
            dest="rollout_global_dataset",
            help="No managed prompt data: the rollout function finds its own.",
        ),
        Flag(
            "--data-source-path",
            function_path,
            "slime.rollout.data_source.RolloutDataSourceWithBuffer",
            "Class that supplies prompts: class(args) with get_samples, add_samples, save, load, __len__.",
        ),
        Flag(
            "--loss-mask-type",
            text,
            "qwen",
            "Chat template style of the multi-turn SFT loss mask.",
            choices=("qwen", "qwen3", "distill_qwen"),
        ),
        Flag("--rollout-buffer-url", text, help="Rollout-buffer service.", pending=pending.ROLLOUT_BUFFER),
        Flag(
            "--fetch-trajectory-retry-times",
            integer,
            -1,
            "Retries of a fetch from the rollout-buffer service; -1: no limit.",
            pending=pending.ROLLOUT_BUFFER,
        ),
        Flag(
            "--min-batch-collection-ratio",
            number,
            1.0,
            "Share of a batch that the rollout-buffer service must hold.",
            pending=pending.ROLLOUT_BUFFER,
        ),
        Flag(
            "--rollout-task-type",
            text,
            "math",
            "Task of the rollout-buffer service.",
            pending=pending.ROLLOUT_BUFFER,
        ),
    ),
)
