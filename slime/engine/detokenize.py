"""Token ids -> text: the final text, growing text for streams, and stop strings."""

from __future__ import annotations

from slime.engine.protocol import SamplingParams
from slime.engine.sequence import Sequence

REPLACEMENT = "�"


def decode(tokenizer, ids: list[int], params: SamplingParams) -> str:
    return tokenizer.decode(
        ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def find_stop_string(tokenizer, seq: Sequence) -> str | None:
    """The stop string that the newest token completed, if any."""
    longest = max(len(stop.encode()) for stop in seq.params.stop)
    # A token is at least a byte (special tokens may be empty text, hence the room).
    first = max(seq.prompt_len, len(seq.token_ids) - longest - 4)
    tail = tokenizer.decode(seq.token_ids[first:], skip_special_tokens=False)
    return next((stop for stop in seq.params.stop if stop in tail), None)


def trim_stop(text: str, reason: dict | None, params: SamplingParams) -> str:
    """Cut the text at the stop string that ended it, unless `no_stop_trim`."""
    matched = reason.get("matched") if reason else None
    if isinstance(matched, str) and not params.no_stop_trim:
        where = text.find(matched)
        return text if where < 0 else text[:where]
    return text


def final_text(tokenizer, seq: Sequence) -> str:
    """Text of a finished sequence; an end token is cut like a stop string."""
    if tokenizer is None:
        return ""
    ids, reason = seq.output_ids, seq.finish_reason
    if isinstance(reason.get("matched"), int) and not seq.params.no_stop_trim:
        ids = ids[:-1]
    return trim_stop(decode(tokenizer, ids, seq.params), reason, seq.params)


class IncrementalDetokenizer:
    """Text of a growing list of ids, decoding only the new end.

    The end is decoded together with the few tokens before it, because a tokenizer may join or space them; half of a
    multi-byte character waits for the rest.
    """

    def __init__(self, tokenizer, params: SamplingParams):
        self.tokenizer = tokenizer
        self.params = params
        self.text = ""
        self.context = 0
        self.done = 0

    def feed(self, ids: list[int]) -> str:
        """All text so far; `ids` are all output ids."""
        if self.tokenizer is None:
            return ""
        before = decode(self.tokenizer, ids[self.context : self.done], self.params)
        after = decode(self.tokenizer, ids[self.context :], self.params)
        if len(after) > len(before) and not after.endswith(REPLACEMENT):
            self.text += after[len(before) :]
            self.context, self.done = self.done, len(ids)
        return self.text
