"""Prompt data sets: jsonl and parquet files read row by row into `Sample`s.

A jsonl file is indexed by byte offsets and checked once at load; rows are parsed when they are asked for, so a file of
any size costs 24 bytes per row. Every error names file, line and key.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_PROMPTS_PER_CHUNK = 1024


class DataError(ValueError):
    """A row that cannot be used; the message starts with file:line."""


def split_path(path: str) -> tuple[str, slice]:
    """`file.jsonl@[a:b]` -> (file.jsonl, slice(a, b)); without a suffix the slice takes everything."""
    match = _SLICE.match(path)
    if match is None:
        if "@[" in path:
            raise DataError(f"{path}: a row slice is written path@[start:stop], with integers or nothing")
        return path, slice(None)
    start, stop = (int(v) if v else None for v in match.group("start", "stop"))
    return match.group("path"), slice(start, stop)


class JsonlRows:
    """The rows of a jsonl file (blank lines skipped), parsed on access."""

    def __init__(self, path: str, rows: slice = slice(None)) -> None:
        self.path = path
        starts, lengths, lines = array("Q"), array("L"), array("L")
        offset = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    starts.append(offset)
                    lengths.append(len(line))
                    lines.append(number)
                offset += len(line)
        self._starts, self._lengths, self._lines = starts[rows], lengths[rows], lines[rows]
        self._fd = os.open(path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self._starts)

    def __del__(self) -> None:
        if "_fd" in self.__dict__:
            os.close(self._fd)

    def where(self, row: int) -> str:
        return f"{self.path}:{self._lines[row]}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            value = json.loads(os.pread(self._fd, self._lengths[row], self._starts[row]))
        except ValueError as error:
            raise DataError(f"{self.where(row)}: not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.where(row)}: a row must be a JSON object, this is a {type(value).__name__}")
        return value


class ParquetRows:
    """The rows of a parquet file, kept as an Arrow table of the columns that are used."""

    def __init__(self, path: str, rows: slice = slice(None), columns: Sequence[str] = ()) -> None:
        import pyarrow
        from pyarrow import parquet

        self.path = path
        try:
            present = parquet.read_schema(path).names
            table = parquet.read_table(path, columns=[c for c in columns if c in present])
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path}: not a readable parquet file: {error}") from error
        self._range = range(table.num_rows)[rows]
        self._table = table

    def __len__(self) -> int:
        return len(self._range)

    def where(self, row: int) -> str:
        return f"{self.path}:row {self._range[row]}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._table.slice(self._range[row], 1).to_pylist()[0]


def open_rows(path: str, columns: Sequence[str] = ()) -> JsonlRows | ParquetRows:
    """The rows of `file.jsonl` or `file.parquet`, with an optional `@[start:stop]`."""
    file, rows = split_path(path)
    if not os.path.isfile(file):
        raise DataError(f"{file}: there is no such file")
    if file.endswith(".parquet"):
        return ParquetRows(file, rows, columns)
    if file.endswith((".jsonl", ".json")):
        return JsonlRows(file, rows)
    raise DataError(f"{file}: prompt data must be .jsonl or .parquet")


class Dataset:
    """Prompts of one file as `Sample`s, in file order or in the shuffled order of an epoch.

    Args:
        max_length: prompts of more tokens are dropped at load (None keeps all).
        multimodal_keys: {media type: column}; the columns go to `Sample.multimodal_inputs`.
        seed: base of the shuffle.

    Raises:
        DataError: naming file, line and key, for the first row that cannot be used.
    """

    def __init__(
        self,
        path: str,
        tokenizer=None,
        max_length: int | None = None,
        *,
        prompt_key: str = "input",
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str | None = "metadata",
        multimodal_keys: dict[str, str] | None = None,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
        seed: int = 42,
    ) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.prompt_key, self.label_key, self.tool_key = prompt_key, label_key, tool_key
        self.metadata_key = metadata_key
        self.multimodal_keys = multimodal_keys or {}
        self.apply_chat_template = apply_chat_template
        self.apply_chat_template_kwargs = apply_chat_template_kwargs or {}
        self.seed = seed
        columns = [prompt_key, label_key, tool_key, metadata_key, *self.multimodal_keys.values()]
        self.rows = open_rows(path, [c for c in columns if c])
        self._kept = array("L", self._select(max_length))
        if not self._kept:
            raise DataError(
                f"{path}: no prompt left ({len(self.rows)} rows, longest allowed {max_length} tokens: "
                "see --rollout-max-prompt-len)"
                if len(self.rows)
                else f"{path}: no rows"
            )
        self._order: Sequence[int] = self._kept
        self.epoch_id: int | None = None

    def _select(self, max_length: int | None) -> Iterator[int]:
        """Check every row; yield those whose prompt is short enough."""
        too_long: list[int] = []
        chunk: list[int] = []
        texts: list[str] = []

        def measured() -> Iterator[int]:
            for row, ids in zip(chunk, self.tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
                if len(ids) > max_length:
                    too_long.append(row)
                else:
                    yield row
            chunk.clear()
            texts.clear()

        for row in range(len(self.rows)):
            prompt = self._build(row, render=max_length is not None).prompt
            if max_length is None:
                yield row
                continue
            chunk.append(row)
            texts.append(self._text(prompt))
            if len(chunk) == _PROMPTS_PER_CHUNK:
                yield from measured()
        if chunk:
            yield from measured()
        if too_long:
            logger.warning(
                "%s: dropped %d of %d prompts longer than %d tokens, the first at %s",
                self.path, len(too_long), len(self.rows), max_length, self.rows.where(too_long[0]),
            )  # fmt: skip

    def _text(self, prompt: str | list[dict[str, Any]]) -> str:
        """What is measured: of a message list the part before the first answer."""
        if isinstance(prompt, str):
            return prompt
        asked = list(itertools.takewhile(lambda message: message.get("role") != "assistant", prompt))
        return self.tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True, **self.apply_chat_template_kwargs
        )

    def _build(self, row: int, render: bool = True) -> Sample:
        data = self.rows[row]
        where = self.rows.where(row)
        prompt = self._required(data, self.prompt_key, "--input-key", where)
        metadata = self._metadata(data, where)
        tools = self._tools(data, where)
        if tools is not None:
            metadata = {**metadata, "tools": tools}
        return Sample(
            prompt=self._prompt(prompt, tools, where, render),
            label=self._label(data, where),
            metadata=metadata,
            multimodal_inputs=self._multimodal(data, where),
        )

    def _required(self, data: dict[str, Any], key: str, flag: str, where: str) -> Any:
        if data.get(key) is None:
            raise DataError(f"{where}: there is no {key!r} ({flag}); the row has {sorted(data)}")
        return data[key]

    def _prompt(self, prompt: Any, tools: list | None, where: str, render: bool) -> str | list[dict[str, Any]]:
        if not isinstance(prompt, (str, list)):
            raise DataError(f"{where}: {self.prompt_key!r} must be a string or a list of messages, not {prompt!r:.80}")
        if not self.apply_chat_template:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for message in messages:
            if not isinstance(message, dict) or "role" not in message:
                raise DataError(f"{where}: {self.prompt_key!r} holds a message without role: {message!r:.120}")
        if not render:
            return messages
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **self.apply_chat_template_kwargs
            )
        except Exception as error:
            raise DataError(f"{where}: the chat template cannot render {self.prompt_key!r}: {error}") from error

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

    def _multimodal(self, data: dict[str, Any], where: str) -> dict[str, list] | None:
        found = {}
        for media, column in self.multimodal_keys.items():
            value = self._required(data, column, "--multimodal-keys", where)
            found[media] = value if isinstance(value, list) else [value]
        return found or None

    def shuffle(self, epoch_id: int) -> None:
        """Take the order of an epoch: a permutation of the original order that depends on seed + epoch alone."""
        if self.epoch_id == epoch_id:
            return
        order = list(range(len(self._kept)))
        random.Random(self.seed + epoch_id).shuffle(order)
        self._order = array("L", (self._kept[i] for i in order))
        self.epoch_id = epoch_id

    @property
    def samples(self) -> Dataset:
        """The samples as a sequence (itself: they are built on access)."""
        return self

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._build(row) for row in self._order[index]]
        return self._build(self._order[index])

    def __iter__(self) -> Iterator[Sample]:
        return (self._build(row) for row in self._order)
