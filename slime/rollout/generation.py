"""From a pending sample to a rewarded one: the engine call, custom generate functions, rewards and sample hooks."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from slime.rollout.errors import HookFailure, RolloutError, blame, describe
from slime.rollout.generate_state import GenerateState
from slime.rollout.rm_hub import async_rm, batched_async_rm, check_reward
from slime.utils.http_utils import HttpError, get, post, request
from slime.utils.misc import accepted, flatten, function_name, load_function, parameters
from slime.utils.multimodal import request_fields
from slime.utils.served_models import ADAPTER_NAME
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)
ABORT_INTERVAL = 3.0
"""Seconds after which the abort is repeated: a request may have been between router and engine at the first."""


def router_url(args) -> str:
    host = f"[{args.sglang_router_ip}]" if ":" in args.sglang_router_ip else args.sglang_router_ip
    return f"http://{host}:{args.sglang_router_port}"


async def generate(args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Generate the response of a sample, or the rest of one that was aborted.

    The prompt is tokenised once; the ids and log-probs that the engine returns are what the trainer sees.

    Raises:
        RolloutError: the engine refused the request; the message names the sample.
    """
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise RolloutError(f"{describe(sample)} is {sample.status.value}: only pending or aborted ones are generated")
    if not sample.tokens:
        sample.tokens = _prompt_ids(args, sample)
    limit = args.eval_max_context_len if evaluation else None
    context = limit or args.rollout_max_context_len
    budget = sampling_params["max_new_tokens"] - sample.response_length
    if context is not None:
        budget = min(budget, context - len(sample.tokens))
    if budget <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    params = {**sampling_params, "max_new_tokens": budget}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = min(budget, max(0, params["min_new_tokens"] - sample.response_length))
    payload: dict[str, Any] = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    replays_sampling = args.use_rollout_top_p_replay and not evaluation
    if replays_sampling:
        payload["return_sampling_mask"] = True
    with blame("--multimodal-keys", "media", sample):
        payload |= request_fields(sample.multimodal_inputs)
    if args.use_rollout_routing_replay:
        payload["return_routed_experts"] = True
    if args.lora_sync == "adapter":
        payload["lora_path"] = ADAPTER_NAME
    headers = {"X-SMG-Routing-Key": sample.session_id} if sample.session_id else None
    try:
        with GenerateState(args).dp_rank_context() as dp_rank:
            if dp_rank is not None:
                payload["routed_dp_rank"] = dp_rank
            output = await post(f"{router_url(args)}/generate", payload, headers=headers)
    except HttpError as error:
        hint = "--rollout-max-prompt-len drops long prompts at load" if sample.tokens else "its prompt is empty"
        raise RolloutError(
            f"the engine refused {describe(sample)} ({len(sample.tokens)} input tokens, {budget} new): "
            + error.body[:1000]
            + (f"; {hint}" if error.status == 400 else "")
        ) from error
    meta_info = output["meta_info"]
    if args.use_rollout_routing_replay:
        count = len(sample.tokens) + len(meta_info.get("output_token_logprobs") or [])
        sample.rollout_routed_experts = routed_experts(args, meta_info, count)
    scored = meta_info.get("output_token_logprobs") or []
    return sample.append_response_tokens(
        args,
        tokens=[item[1] for item in scored],
        # Trainer and engine renormalise over the same tokens, so that their ratio compares like with like.
        log_probs=meta_info["output_token_sampling_logprobs"] if replays_sampling else [item[0] for item in scored],
        trainable=True,
        meta_info=meta_info,
        text=output["text"],
    )


def routed_experts(args, meta_info: dict[str, Any], tokens: int) -> np.ndarray:
    """int32 [tokens - 1, layers, top k]: where each token of a sequence but its last went in every layer.

    Raises:
        RolloutError: the engine's reply has none, or of other tokens.
    """
    encoded = meta_info.get("routed_experts")
    if encoded is None:
        raise RolloutError("--use-rollout-routing-replay: the engine's reply has no routed_experts")
    experts = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    layers = _num_layers(args.hf_checkpoint)
    if tokens < 2 or len(experts) % ((tokens - 1) * layers):
        raise RolloutError(f"{len(experts)} routed_experts do not fit {tokens} tokens and {layers} layers")
    return experts.reshape(tokens - 1, layers, -1)


@cache
def _num_layers(checkpoint: str) -> int:
    config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    return {**config, **(config.get("text_config") or {})}["num_hidden_layers"]


def _prompt_ids(args, sample: Sample) -> list[int]:
    if not isinstance(sample.prompt, str):
        raise RolloutError(
            f"the prompt of {describe(sample)} is a message list; pass --apply-chat-template, or a "
            "--custom-generate-function-path that renders it"
        )
    return GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)


async def generate_and_rm(
    args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one sample and reward it in the same task. Fan-out by a custom generate function gives a list.

    A sample that is finished already (recycled in a group) keeps its response. Aborted samples get no reward, and with
    `--group-rm` the group's rewards come later.
    """
    if _is_done(sample) and not args.group_rm:
        return sample
    state = GenerateState(args)
    result: Sample | list[Sample] = sample
    if sample.status not in FINISHED:
        async with state.semaphore:
            if state.aborted and not evaluation:
                sample.status = Sample.Status.ABORTED
                return sample
            if args.mask_offpolicy_in_partial_rollout and sample.response_length:
                sample.loss_mask = [0] * sample.response_length
            result = await _call_generate(args, sample, sampling_params, evaluation)
    pieces = list(flatten([result]))
    if args.group_rm or any(piece.aborted for piece in pieces):
        return result
    await _reward(args, result, evaluation)
    return await _run_sample_hooks(args, result, evaluation)


def _is_done(sample: Sample) -> bool:
    """Finished, rewarded and hooked in an earlier rollout that had no room for its group."""
    return sample.status in FINISHED and sample.reward is not None


async def _call_generate(args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool):
    path = sample.generate_function_path or args.custom_generate_function_path
    if not path:
        return await generate(args, sample, sampling_params, evaluation=evaluation)
    flag = "Sample.generate_function_path" if sample.generate_function_path else "--custom-generate-function-path"
    function = load_function(path, flag)
    original = sample.clone()
    extra = {"evaluation": evaluation} if "evaluation" in parameters(function) else {}
    with blame(flag, function, sample):
        result = function(args, sample, sampling_params, **extra)
        if inspect.isawaitable(result):
            result = await result
    pieces = list(flatten([result]))
    if not pieces or not all(isinstance(piece, Sample) for piece in pieces):
        raise HookFailure(f"{flag} {function_name(function)} returned {result!r:.200}, not a Sample or a list of them")
    if isinstance(result, list):
        if any(piece.aborted for piece in pieces):
            # A trajectory that is cut into pieces has no end to continue from: it starts again.
            original.status = Sample.Status.ABORTED
            return original
        _annotate_fan_out(pieces, original, f"{flag} {function_name(function)}")
        result = pieces
    for piece in pieces:
        _check_lengths(piece, f"{flag} {function_name(function)}")
        if not (piece.tokens or piece.aborted or evaluation or args.debug_rollout_only):
            raise HookFailure(f"{flag} {function_name(function)}: {describe(piece)} has no tokens to train on")
        if piece.reward is not None:
            piece.reward = check_reward(args, piece.reward, piece, f"{path} ({flag})")
    return result


def _annotate_fan_out(pieces: list[Sample], original: Sample, who: str) -> None:
    """The pieces of one trajectory share `rollout_id`, unless the function says itself which belong together.

    Its ids need to differ within one call only: another sample's call may use the same.
    """
    annotated = [piece.rollout_id is not None for piece in pieces]
    if any(annotated) and not all(annotated):
        raise HookFailure(f"{who} set rollout_id on some of the samples it returned: set it on all or on none")
    numbers: dict = {}
    for piece in pieces:
        numbers.setdefault(piece.rollout_id, len(numbers))
    for piece in pieces:
        piece.index = original.index if piece.index is None else piece.index
        piece.group_index = original.group_index if piece.group_index is None else piece.group_index
        number = numbers[piece.rollout_id]
        piece.rollout_id = original.index if len(numbers) == 1 else f"{original.index}.{number}"


def _check_lengths(sample: Sample, who: str) -> None:
    lists = {"loss_mask": sample.loss_mask, "rollout_log_probs": sample.rollout_log_probs}
    wrong = {
        name: len(values)
        for name, values in lists.items()
        if values is not None and len(values) != sample.response_length
    }
    if sample.response_length > len(sample.tokens):
        wrong["tokens"] = len(sample.tokens)
    if wrong:
        raise HookFailure(
            f"{who}: {describe(sample)} has response_length {sample.response_length} but lengths {wrong}"
        )


async def _reward(args, result: Sample | list[Sample], evaluation: bool) -> None:
    if isinstance(result, Sample):
        if result.reward is None:
            result.reward = await async_rm(args, result, evaluation=evaluation)
        return
    open_samples = [piece for piece in result if piece.reward is None]
    if open_samples:
        rewards = await batched_async_rm(args, open_samples, evaluation=evaluation)
        for piece, reward in zip(open_samples, rewards, strict=True):
            piece.reward = reward


async def _run_sample_hooks(args, result: Sample | list[Sample], evaluation: bool):
    if not args.rollout_sample_hook_path:
        return result
    if isinstance(result, list):
        return [await _run_sample_hooks(args, piece, evaluation) for piece in result]
    state = GenerateState(args)
    rollout_id = state.eval_rollout_id if evaluation else state.rollout_id
    for path in args.rollout_sample_hook_path:
        hook = load_function(path, "--rollout-sample-hook-path")
        with blame("--rollout-sample-hook-path", hook, result):
            output = hook(args, result, **accepted(hook, rollout_id=rollout_id, evaluation=evaluation))
            if inspect.isawaitable(output):
                output = await output
        if output is not None and not isinstance(output, Sample):
            raise HookFailure(
                f"--rollout-sample-hook-path {function_name(hook)} returned {output!r:.200}, not a Sample or None"
            )
        result = result if output is None else output
    return result


async def generate_and_rm_group(
    args, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """Generate and reward the samples of one prompt together.

    Every sample has its own sampling seed, `rollout_seed + sample.index`, so a run can be repeated.
    """
    state = GenerateState(args)
    if (state.aborted and not evaluation) or all(_is_done(sample) for sample in flatten(group)):
        return group
    tasks = []
    for position, sample in enumerate(group):
        params = sampling_params.copy()
        if isinstance(sample, list):  # the pieces of a finished fan-out come back from the buffer as they are
            tasks.append(_finished(args, sample, evaluation))
            continue
        params["sampling_seed"] = args.rollout_seed + (position if sample.index is None else sample.index)
        tasks.append(generate_and_rm(args, sample, params, evaluation=evaluation))
    results = await _gather(tasks)
    members = list(flatten(results))
    if args.group_rm and not (state.aborted and not evaluation) and not any(member.aborted for member in members):
        await _reward(args, members, evaluation)
        results = [await _run_sample_hooks(args, result, evaluation) for result in results]
    return results


async def _finished(args, pieces: list[Sample], evaluation: bool) -> list[Sample]:
    if not args.group_rm and not any(piece.aborted for piece in pieces):
        await _reward(args, pieces, evaluation)
    return pieces


async def _gather(coroutines: list) -> list:
    """As asyncio.gather, but the first failure cancels the others before it is raised."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def worker_urls(args) -> list[str]:
    """Addresses of the engines behind the router (either router's API)."""
    base = router_url(args)
    try:
        reply = await get(f"{base}/workers")
        return [worker["url"] for worker in reply["workers"]]
    except HttpError as error:
        if error.status not in (404, 405):
            raise
        return (await get(f"{base}/list_workers"))["urls"]


async def abort(args, rollout_id: int) -> list[list[Sample]]:
    """Stop everything in flight. With `--partial-rollout` returns the groups to continue later, else nothing."""
    state = GenerateState(args)
    state.aborted = True
    groups: list[list[Sample]] = []
    while state.pendings:
        await abort_all(args)
        done, state.pendings = await asyncio.wait(state.pendings, timeout=ABORT_INTERVAL)
        groups += [task.result() for task in done]
    if not args.partial_rollout:
        return []
    for sample in flatten(groups):
        if sample.response_length:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups


async def abort_all(args) -> None:
    """Ask every worker to abort. One that does not answer has nothing to return either, and is only reported."""

    async def one(url: str) -> None:
        try:
            await request("POST", f"{url}/abort_request", json_body={"abort_all": True}, max_retries=2, timeout=30)
        except Exception as error:
            logger.warning("abort: worker %s: %s: %s", url, type(error).__name__, error)

    await asyncio.gather(*(one(url) for url in await worker_urls(args)))
