"""Prompt data."""

from typing import Any

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
from slime.utils.multimodal import MEDIA


def media_columns(raw: Any) -> dict[str, str]:
    """{medium: column} from a JSON object or a mapping."""
    columns = json_object(raw)
    for medium, column in columns.items():
        if medium not in MEDIA or not isinstance(column, str):
            raise ValueError(f'must map {", ".join(MEDIA)} to columns, such as {{"image": "images"}}')
    return columns


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
            media_columns,
            help="JSON object {image | video | audio: column}; items take the place of <image> ... in the prompt.",
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
