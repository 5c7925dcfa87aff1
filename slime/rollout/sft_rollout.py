"""Supervised fine-tuning as a rollout function: nothing is generated, the data set's own answers are the responses.

Two forms of row: a message list (without `--apply-chat-template`; every assistant turn is trained on), or a prompt
string with the answer in the label column.
"""

from __future__ import annotations

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.errors import RolloutError, describe
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import flatten
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


def generate_rollout(args, rollout_id: int, data_source, evaluation: bool = False) -> RolloutFnTrainOutput:
    """`--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss`."""
    if evaluation:
        raise RolloutError(
            "sft_rollout does not evaluate: pass --eval-function-path slime.rollout.sglang_rollout.generate_rollout"
        )
    tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    masks = MultiTurnLossMaskGenerator(tokenizer, args.loss_mask_type, args.apply_chat_template_kwargs)
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in flatten(groups):
        if isinstance(sample.prompt, str):
            _fill_from_label(tokenizer, sample)
        else:
            _fill_from_messages(masks, sample)
        sample.status = Sample.Status.COMPLETED
        _cut(args, sample)
    return RolloutFnTrainOutput(samples=groups)


def _fill_from_messages(masks: MultiTurnLossMaskGenerator, sample: Sample) -> None:
    try:
        tokens, mask = masks.get_loss_mask(sample.prompt, sample.metadata.get("tools"))
    except (ValueError, TypeError, KeyError) as error:
        raise RolloutError(f"{describe(sample)}: {error}") from error
    if 1 not in mask:
        raise RolloutError(f"{describe(sample)} has no token to train on (step_loss_mask is 0 everywhere?)")
    sample.tokens = tokens
    (sample.response_length,) = masks.get_response_lengths([mask])
    sample.loss_mask = mask[-sample.response_length :]
    sample.response = masks.tokenizer.decode(tokens[-sample.response_length :])


def _fill_from_label(tokenizer, sample: Sample) -> None:
    if not sample.label:
        raise RolloutError(f"{describe(sample)} has a text prompt but no answer: pass --label-key")
    prompt_ids = tokenizer.encode(sample.prompt, add_special_tokens=False)
    response_ids = tokenizer.encode(sample.label, add_special_tokens=False)
    end = tokenizer.eos_token_id
    if end is not None and (not response_ids or response_ids[-1] != end):
        response_ids = [*response_ids, end]
    sample.tokens = prompt_ids + response_ids
    sample.response = sample.label
    sample.response_length = len(response_ids)
    sample.loss_mask = [1] * len(response_ids)


def _cut(args, sample: Sample) -> None:
    """Cut what is longer than `--rollout-max-context-len`."""
    limit = args.rollout_max_context_len
    excess = 0 if limit is None else len(sample.tokens) - limit
    if excess <= 0:
        return
    if excess >= sample.response_length or not any(sample.loss_mask[:-excess]):
        raise RolloutError(
            f"{describe(sample)} has {len(sample.tokens)} tokens: nothing is left to train on in {limit}"
        )
    sample.tokens = sample.tokens[:limit]
    sample.loss_mask = sample.loss_mask[:-excess]
    sample.response_length -= excess
    sample.status = Sample.Status.TRUNCATED
