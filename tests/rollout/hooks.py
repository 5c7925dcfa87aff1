"""Plug-ins that the tests name by path."""

import asyncio
import time

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

CALLS: list = []


async def reward_parity(args, sample, **kwargs):
    """1 when the last token is even."""
    return float(sample.tokens[-1] % 2 == 0)


async def reward_length(args, sample):
    return {"score": float(sample.response_length), "other": 0}


def reward_sync(args, sample, **kwargs):
    return 0.25


async def reward_raises(args, sample, **kwargs):
    raise ZeroDivisionError("no judge today")


async def reward_hangs(args, sample, **kwargs):
    await asyncio.Event().wait()


async def reward_blocks(args, sample, **kwargs):
    time.sleep(20)


def reward_blocks_in_sync(args, sample, **kwargs):
    time.sleep(20)


async def reward_none(args, sample, **kwargs):
    return None


async def reward_group(args, samples, **kwargs):
    CALLS.append([s.index for s in samples])
    return [float(i) for i in range(len(samples))]


async def reward_group_short(args, samples, **kwargs):
    return [1.0]


async def generate_pieces(args, sample, sampling_params, evaluation=False):
    """Two pieces of one trajectory."""
    CALLS.append(evaluation)
    pieces = []
    for part in range(2):
        piece = Sample(tokens=[1, 2, 40 + part], response_length=1, response="x", rollout_log_probs=[-1.0])
        piece.status = Sample.Status.COMPLETED
        pieces.append(piece)
    return pieces


async def generate_old_form(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.status = [1, 2], 1, Sample.Status.COMPLETED
    return sample


async def generate_wrong_mask(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.loss_mask = [1, 2], 1, [1, 1]
    sample.status = Sample.Status.COMPLETED
    return sample


async def generate_no_tokens(args, sample, sampling_params):
    sample.response, sample.status = "an answer", Sample.Status.COMPLETED
    return sample


async def generate_raises(args, sample, sampling_params):
    raise KeyError("tool")


def filter_odd_groups(args, samples, **kwargs):
    keep = samples[0].group_index % 2 == 0
    return DynamicFilterOutput(keep, None if keep else "odd")


def filter_odd_groups_but_keep(args, samples, **kwargs):
    keep = samples[0].group_index % 2 == 0
    return DynamicFilterOutput(keep, None if keep else "odd", keep_when_insufficient=True)


def filter_late(args, samples):
    return DynamicFilterOutput(samples[0].group_index >= 20, "early")


def filter_bool(args, samples):
    return samples[0].group_index % 2 == 0


def filter_raises(args, samples):
    raise RuntimeError("filter broke")


def sample_hook(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["hook"] = [rollout_id, evaluation, sample.reward]


async def sample_hook_async(args, sample):
    sample.metadata["hook2"] = True
    return sample


def remove_first(args, groups):
    for group in groups:
        group[0].remove_sample = True


def all_samples(args, groups, data_source):
    CALLS.append(("all", len(groups), data_source))


def buffer_newest(args, rollout_id, buffer, num_samples):
    taken = buffer[-num_samples:]
    del buffer[-num_samples:]
    return taken


async def reward_raises_from_8(args, sample, **kwargs):
    if sample.index >= 8:
        raise ZeroDivisionError("no judge today")
    return 1.0


def count_hook(args, sample):
    sample.metadata["hooked"] = sample.metadata.get("hooked", 0) + 1
