"""All flag tables, in the order in which help and docs show them."""

from slime.arguments.families import (
    algorithm,
    batching,
    checkpoint,
    cluster,
    corrections,
    data,
    debug,
    engine,
    evaluation,
    general,
    megatron,
    model,
    observability,
    optimizer,
    reward,
    rollout,
    router,
    sglang_router,
    weight_sync,
)
from slime.arguments.flag import Family, Flag

FAMILIES: tuple[Family, ...] = tuple(
    module.FAMILY
    for module in (
        general,
        cluster,
        model,
        optimizer,
        data,
        rollout,
        batching,
        evaluation,
        checkpoint,
        algorithm,
        corrections,
        reward,
        weight_sync,
        engine,
        router,
        sglang_router,
        observability,
        debug,
        megatron,
    )
)
FLAGS: tuple[Flag, ...] = tuple(flag for family in FAMILIES for flag in family.flags)
