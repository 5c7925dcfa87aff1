"""Prompt data sets: rows of a file become `Sample`s, checked once at load and built on access.

Every error names file, line and key.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from slime.utils.multimodal import items_of, place_media
from slime.utils.rows import DataError, open_rows
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_PROMPTS_PER_CHUNK = 1024


class PromptRows:
    """The rows of one prompt file as samples, in file order.

    Args:
        multimodal_keys: {image | video | audio: column}; the columns go to `Sample.multimodal_inputs`.

    Raises:
        DataError: naming file, line and key, when a row is built that cannot be used.
    """

    def __init__(
        self,
        path: str,
        tokenizer=None,
        *,
        prompt_key: str = "input",
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str | None = "metadata",
        multimodal_keys: dict[str, str] | None = None,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt_key, self.label_key, self.tool_key = prompt_key, label_key, tool_key
        self.metadata_key = metadata_key
        self.multimodal_keys = multimodal_keys or {}
        self.apply_chat_template = apply_chat_template
        self.apply_chat_template_kwargs = apply_chat_template_kwargs or {}
        columns = [prompt_key, label_key, tool_key, metadata_key, *self.multimodal_keys.values()]
        self.rows = open_rows(path, [c for c in columns if c])

    def __len__(self) -> int:
        return len(self.rows)

    def text(self, prompt: str | list[dict[str, Any]]) -> str:
        """What is measured: of a message list the part before the first answer."""
        if isinstance(prompt, str):
            return prompt
        asked = list(itertools.takewhile(lambda message: message.get("role") != "assistant", prompt))
        return self.tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True, **self.apply_chat_template_kwargs
        )

    def build(self, row: int, render: bool = True) -> Sample:
        data = self.rows[row]
        where = self.rows.where(row)
        prompt = self._required(data, self.prompt_key, "--input-key", where)
        metadata = self._metadata(data, where)
        tools = self._tools(data, where)
        if tools is not None:
            metadata = {**metadata, "tools": tools}
        media = {kind: items for kind, column in self.multimodal_keys.items() if (items := items_of(data.get(column)))}
        return Sample(
            prompt=self._prompt(prompt, tools, media, where, render),
            label=self._label(data, where),
            metadata=metadata,
            multimodal_inputs=media or None,
        )

    def _required(self, data: dict[str, Any], key: str, flag: str, where: str) -> Any:
        if key in data and data[key] is None:
            raise DataError(f"{where}: {key!r} ({flag}) is null")
        if key not in data:
            raise DataError(f"{where}: there is no {key!r} ({flag}); the row has {sorted(data)}")
        return data[key]

    def _prompt(
        self, prompt: Any, tools: list | None, media: dict[str, list], where: str, render: bool
    ) -> str | list[dict[str, Any]]:
        if not isinstance(prompt, (str, list)):
            raise DataError(f"{where}: {self.prompt_key!r} must be a string or a list of messages, not {prompt!r:.80}")
        if not self.apply_chat_template:
            return self._placed(prompt, media, where)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for message in messages:
            if not isinstance(message, dict) or "role" not in message:
                raise DataError(f"{where}: {self.prompt_key!r} holds a message without role: {message!r:.120}")
        messages = self._placed(messages, media, where)
        if not render:
            return messages
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **self.apply_chat_template_kwargs
            )
        except Exception as error:
            raise DataError(f"{where}: the chat template cannot render {self.prompt_key!r}: {error}") from error

    def _placed(self, prompt: Any, media: dict[str, list], where: str) -> Any:
        if not self.multimodal_keys:
            return prompt
        try:
            return place_media(prompt, media)
        except ValueError as error:
            raise DataError(f"{where}: {self.prompt_key!r}: {error} (--multimodal-keys)") from error

    def _label(self, data: dict[str, Any], where: str) -> Any:
        if self.label_key is None:
            return None
        label = self._required(data, self.label_key, "--label-key", where)
        return label if isinstance(label, (str, list, dict)) else str(label)

    def _metadata(self, data: dict[str, Any], where: str) -> dict[str, Any]:
        metadata = data.get(self.metadata_key) if self.metadata_key else None
        metadata = self._parsed(metadata, self.metadata_key, where) if isinstance(metadata, str) else metadata
        if not isinstance(metadata, (dict, type(None))):
            raise DataError(f"{where}: {self.metadata_key!r} (--metadata-key) must be an object, not {metadata!r:.80}")
        return dict(metadata or {})

    def _tools(self, data: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
        tools = data.get(self.tool_key) if self.tool_key else None
        tools = self._parsed(tools, self.tool_key, where) if isinstance(tools, str) else tools
        if not isinstance(tools, (list, type(None))):
            raise DataError(f"{where}: {self.tool_key!r} (--tool-key) must be a list of tools, not {tools!r:.80}")
        return tools

    def _parsed(self, text: str, key: str | None, where: str) -> Any:
        try:
            return json.loads(text) if text.strip() else None
        except ValueError as error:
            raise DataError(f"{where}: {key!r} is not valid JSON: {error}") from error


class Dataset:
    """Prompts of one file as `Sample`s, in file order or in the shuffled order of an epoch.

    Args:
        max_length: prompts of more tokens are dropped at load (None keeps all).
        seed: base of the shuffle.
        columns: keyword arguments of `PromptRows`.

    Raises:
        DataError: naming file, line and key, for the first row that cannot be used.
    """

    def __init__(
        self,
        path: str,
        tokenizer=None,
        max_length: int | None = None,
        *,
        seed: int = 42,
        **columns: Any,
    ) -> None:
        self.path = path
        self.prompts = PromptRows(path, tokenizer, **columns)
        self.rows = self.prompts.rows
        self.seed = seed
        self._kept = array("I", self._select(max_length))
        if not self._kept:
            raise DataError(
                f"{path}: no prompt left ({len(self.rows)} rows, longest allowed {max_length} tokens: "
                "see --rollout-max-prompt-len)"
                if len(self.rows)
                else f"{path}: no rows" + (f" (the file has {self.rows.in_file})" if self.rows.in_file else "")
            )
        self._order: Sequence[int] = self._kept
        self.epoch_id: int | None = None

    def _select(self, max_length: int | None) -> Iterator[int]:
        """Check every row; yield those whose prompt is short enough."""
        too_long: list[int] = []
        chunk: list[int] = []
        texts: list[str] = []

        def measured() -> Iterator[int]:
            for row, ids in zip(
                chunk, self.prompts.tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True
            ):
                if len(ids) > max_length:
                    too_long.append(row)
                else:
                    yield row
            chunk.clear()
            texts.clear()

        for row in range(len(self.rows)):
            prompt = self.prompts.build(row, render=max_length is not None).prompt
            if max_length is None:
                yield row
                continue
            chunk.append(row)
            texts.append(self.prompts.text(prompt))
            if len(chunk) == _PROMPTS_PER_CHUNK:
                yield from measured()
        if chunk:
            yield from measured()
        if too_long:
            logger.warning(
                "%s: dropped %d of %d prompts longer than %d tokens, the first at %s",
                self.path, len(too_long), len(self.rows), max_length, self.rows.where(too_long[0]),
            )  # fmt: skip

    def shuffle(self, epoch_id: int) -> None:
        """Take the order of an epoch: a permutation of the original order that depends on seed + epoch alone."""
        if self.epoch_id == epoch_id:
            return
        order = list(range(len(self._kept)))
        random.Random(self.seed + epoch_id).shuffle(order)
        self._order = array("I", (self._kept[i] for i in order))
        self.epoch_id = epoch_id

    @property
    def samples(self) -> Dataset:
        """The samples as a sequence (itself: they are built on access)."""
        return self

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self.prompts.build(row) for row in self._order[index]]
        return self.prompts.build(self._order[index])

    def __iter__(self) -> Iterator[Sample]:
        return (self.prompts.build(row) for row in self._order)
