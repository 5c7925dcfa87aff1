"""The JSON that answers /generate: SGLang's shapes."""

from __future__ import annotations

from typing import Any

from slime.engine.detokenize import final_text
from slime.engine.sequence import Sequence


def _token_logprobs(logprobs: list[float], ids: list[int]) -> list[list[Any]]:
    return [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=False)]


def meta_info(seq: Sequence, num_output: int, version: str) -> dict[str, Any]:
    """`meta_info` with the first `num_output` tokens; `version` is the engine's weight version now."""
    request = seq.request
    spans = [list(span) for span in seq.versions]
    if spans and seq.finish_reason is None:
        spans[-1][2] = num_output
    meta = {
        "id": seq.rid,
        "finish_reason": seq.finish_reason,
        "prompt_tokens": seq.prompt_len,
        "completion_tokens": num_output,
        "cached_tokens": seq.cached_tokens,
        "weight_version": spans[-1][0] if spans else version,
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans],
        "num_retractions": seq.num_retractions,
        "e2e_latency": seq.finished_at - seq.created if seq.finish_reason else None,
    }
    if request.return_logprob:
        start = seq.logprob_start if seq.wants_input_logprobs else seq.prompt_len
        ids = seq.token_ids[start : seq.prompt_len]
        meta["input_token_logprobs"] = _token_logprobs(seq.input_logprobs, ids)
        if seq.wants_input_logprobs and request.logprob_start_len == 0:
            meta["input_token_logprobs"].insert(0, [None, seq.token_ids[0], None])
        elif meta["input_token_logprobs"]:
            meta["input_token_logprobs"][0][0] = None  # as SGLang, wherever they start
        output = seq.token_ids[seq.prompt_len : seq.prompt_len + num_output]
        meta["output_token_logprobs"] = _token_logprobs(seq.output_logprobs[:num_output], output)
        if request.top_logprobs_num:
            meta["output_top_logprobs"] = [
                [[logprob, token, None] for logprob, token in top] for top in seq.output_top_logprobs[:num_output]
            ]
    if request.return_kept_tokens:
        meta["output_token_sampling_mask"] = [ids for ids, _ in seq.output_kept[:num_output]]
        meta["output_token_sampling_logprobs"] = [logprob for _, logprob in seq.output_kept[:num_output]]
    return meta


def final_reply(seq: Sequence, tokenizer, version: str) -> dict[str, Any]:
    """The whole answer of a finished sequence."""
    return {
        "text": final_text(tokenizer, seq),
        "output_ids": seq.output_ids,
        "meta_info": meta_info(seq, seq.num_output, version),
    }


def partial_reply(seq: Sequence, num_output: int, text: str, version: str) -> dict[str, Any]:
    """A stream chunk: everything up to token `num_output`."""
    ids = seq.token_ids[seq.prompt_len : seq.prompt_len + num_output]
    return {"text": text, "output_ids": ids, "meta_info": meta_info(seq, num_output, version)}
