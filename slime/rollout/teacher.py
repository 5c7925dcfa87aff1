"""On-policy distillation from a teacher behind an engine's HTTP API: its log-probs of each generated response."""

from __future__ import annotations

from slime.utils.http_utils import post
from slime.utils.served_models import model_url
from slime.utils.types import Sample


async def teacher_log_probs(args, sample: Sample, *, evaluation: bool = False) -> None:
    """Sample hook: set `sample.teacher_log_probs` by one prefill at `--opd-teacher-url` (or the model of that name).

    Raises:
        ValueError: the teacher scored other tokens than the sample has.
    """
    if evaluation:
        return
    count = sample.response_length
    payload = {
        "input_ids": sample.tokens,
        "return_logprob": True,
        "logprob_start_len": max(len(sample.tokens) - count - 1, 0),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }
    url = args.opd_teacher_url
    reply = await post((url if "://" in url else model_url(args, url)) + "/generate", payload)
    scored = reply["meta_info"]["input_token_logprobs"]
    scored = scored[len(scored) - count :]
    wanted = sample.tokens[len(sample.tokens) - count :]
    # SGLang calls the last id of the vocabulary 0 here.
    if len(scored) != count or any(token not in (0, ours) for (_, token, _), ours in zip(scored, wanted, strict=True)):
        raise ValueError(
            f"--opd-teacher-url {args.opd_teacher_url} returned log-probs of other tokens than the {count} of sample "
            f"{sample.index}"
        )
    sample.teacher_log_probs = [logprob for logprob, _, _ in scored]
