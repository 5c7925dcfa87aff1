"""Reward functions of the system tests."""

import asyncio
import time


async def even_tokens(args, sample, **kwargs):
    """Share of even token ids: learnable, and different within a group."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(1, len(response))


async def slowly_even_tokens(args, sample, **kwargs):
    """As `even_tokens`, late enough for a test to act while a rollout is under way."""
    await asyncio.sleep(0.5)
    return await even_tokens(args, sample)


async def hangs(args, sample, **kwargs):
    if sample.index == 5:
        time.sleep(600)
    return 0.0


async def split_in_two(args, sample, sampling_params):
    """A trajectory as two samples: the first half of the response, then the second with the first as its prompt."""
    from slime.rollout.sglang_rollout import generate

    whole = await generate(args, sample, sampling_params)
    reward = await even_tokens(args, whole)
    half = whole.response_length // 2
    pieces = [whole.clone(), whole.clone()]
    pieces[0].tokens = whole.tokens[: len(whole.tokens) - whole.response_length + half]
    pieces[0].rollout_log_probs, pieces[1].rollout_log_probs = (
        whole.rollout_log_probs[:half],
        whole.rollout_log_probs[half:],
    )
    pieces[0].response_length, pieces[1].response_length = half, whole.response_length - half
    for piece in pieces:
        piece.reward, piece.loss_mask = reward, None
    return pieces


async def judged(args, sample, **kwargs):
    """The mean log-prob that the frozen model `judge` gives the response; it must never have been updated."""
    from slime.utils.http_utils import post
    from slime.utils.served_models import model_url

    payload = {
        "input_ids": sample.tokens,
        "return_logprob": True,
        "logprob_start_len": len(sample.tokens) - sample.response_length - 1,  # SGLang gives the first none
        "sampling_params": {"max_new_tokens": 0},
    }
    meta = (await post(model_url(args, "judge") + "/generate", payload))["meta_info"]
    if int(meta["weight_version"] if meta["weight_version"].isdigit() else 0) > 0:
        raise ValueError(f"the judge serves weight version {meta['weight_version']}")
    scores = [logprob for logprob, _, _ in meta["input_token_logprobs"][-sample.response_length :]]
    return sum(scores) / len(scores)
