"""Rules across flags, and the values that follow from others.

Each module takes the namespace and the list of problems, completes the one and adds to the other. Nothing is launched
and nothing heavy is imported here: paths are looked at, config.json is read, functions are found without importing.
"""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.problems import Problems
from slime.arguments.validation import (
    algorithm,
    batching,
    checkpoints,
    cluster,
    corrections,
    critic,
    data,
    engines,
    evaluation,
    functions,
    loops,
    megatron,
    memory,
    model,
    ranges,
    router,
    server_groups,
    services,
    true_on_policy,
    weight_sync,
)

_STEPS = (
    ranges.check,
    cluster.complete_devices,
    services.complete_debug,
    engines.choose,
    megatron.choose,
    server_groups.read,
    cluster.complete_sizes,
    engines.complete,
    model.complete,
    functions.check,
    batching.complete,
    algorithm.complete,
    corrections.check,
    data.check,
    evaluation.complete,
    checkpoints.complete,
    critic.complete,
    checkpoints.check_quantised,
    router.complete,
    server_groups.complete,
    weight_sync.check,
    megatron.complete,
    services.complete,
)
"""In the order in which derived values build on each other."""


def validate_args(args: Namespace, asynchronous: bool = False) -> None:
    """Check every rule and fill in derived values, in place; afterwards nobody assigns to `args`.

    Raises:
        ConfigError: all broken rules, each with flag, value, rule and fix.
    """
    problems = Problems()
    for step in _STEPS:
        step(args, problems)
    loops.check(args, problems, asynchronous)
    true_on_policy.check(args, problems, asynchronous)
    memory.check(args, problems)
    problems.raise_if_any()
