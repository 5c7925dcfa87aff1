"""Rewards."""

from typing import Any

from slime.arguments.flag import STORE_TRUE, Family, Flag, function_path, number, text

RM_TYPES = ("math", "dapo", "deepscaler", "f1", "gpqa", "ifbench", "remote_rm", "random")
BOXED = tuple(f"boxed_{name}" for name in RM_TYPES)


def reward_type(raw: Any) -> str:
    """A built-in reward, by name."""
    name = text(raw)
    if name not in (*RM_TYPES, *BOXED):
        raise ValueError(f"must be one of {', '.join(RM_TYPES)}, or boxed_ and one of them")
    return name


FAMILY = Family(
    "Reward",
    "How a response is scored.",
    (
        Flag(
            "--rm-type",
            text,
            help="Built-in reward; `boxed_` in front takes the text of \\boxed{} first. "
            "metadata.rm_type of a row has precedence.",
            choices=(*RM_TYPES, *BOXED),
        ),
        Flag(
            "--custom-rm-path",
            function_path,
            help="async fn(args, sample) -> reward; with --group-rm async fn(args, samples) -> rewards.",
        ),
        Flag("--reward-key", text, help="Key of the reward that counts when rewards are dicts."),
        Flag("--group-rm", action=STORE_TRUE, help="Score all responses of a prompt in one call."),
        Flag("--rm-url", text, help="Address that --rm-type remote_rm posts to."),
        Flag("--rm-timeout-secs", number, 30.0, "Longest time of one reward call; more is an error."),
        Flag(
            "--custom-reward-post-process-path",
            function_path,
            help="fn(args, samples) -> (raw_rewards, rewards), instead of normalisation in groups.",
        ),
    ),
)
