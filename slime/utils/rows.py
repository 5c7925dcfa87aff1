"""Rows of jsonl and parquet files, by position, without holding a jsonl file in memory.

A jsonl file is indexed by byte offsets: 16 bytes per row, and a row is read and parsed when it is asked for.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


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
    """The rows of a jsonl file (blank lines skipped), parsed on access. `in_file`: their number without the slice."""

    def __init__(self, path: str, rows: slice = slice(None)) -> None:
        self.path = path
        starts, lengths, lines = array("Q"), array("I"), array("I")
        offset = 0
        with open(path, "rb", buffering=1 << 18) as file:
            for number, line in enumerate(file, 1):
                mark = len(BOM_UTF8) if number == 1 and line.startswith(BOM_UTF8) else 0
                if not line[mark:].isspace():
                    starts.append(offset + mark)
                    lengths.append(len(line) - mark)
                    lines.append(number)
                offset += len(line)
        self.in_file = len(starts)
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
        except RecursionError as error:
            raise DataError(f"{self.where(row)}: not usable JSON: nested too deeply") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.where(row)}: a row must be a JSON object, this is a {type(value).__name__}")
        return value


class ParquetRows:
    """The rows of a parquet file, kept as an Arrow table of the columns and row groups that are used."""

    def __init__(self, path: str, rows: slice = slice(None), columns: Sequence[str] = ()) -> None:
        import pyarrow
        from pyarrow import parquet

        self.path = path
        try:
            file = parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            self.in_file = sum(sizes)
            self._range = range(self.in_file)[rows]
            ends = list(accumulate(sizes))
            groups = [
                i
                for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
                if len(self._range) and end > self._range[0] and end - size <= self._range[-1]
            ]
            self._first = ends[groups[0]] - sizes[groups[0]] if groups else 0
            used = [c for c in dict.fromkeys(columns) if c in file.schema_arrow.names]
            # One group at a time: reading them together holds everything twice for a moment.
            tables = [file.read_row_group(i, columns=used) for i in groups]
            self._table = pyarrow.concat_tables(tables) if tables else None
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: not a readable parquet file: {error}") from error

    def __len__(self) -> int:
        return len(self._range)

    def where(self, row: int) -> str:
        return f"{self.path}:row {self._range[row]}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._table.slice(self._range[row] - self._first, 1).to_pylist()[0]


def open_rows(path: str, columns: Sequence[str] = ()) -> JsonlRows | ParquetRows:
    """The rows of `file.jsonl` or `file.parquet`, with an optional `@[start:stop]`.

    Raises:
        DataError: no such file, another kind of file, or one that cannot be read.
    """
    file, rows = split_path(path)
    if not os.path.isfile(file):
        raise DataError(f"{file}: there is no such file")
    if file.endswith(".parquet"):
        return ParquetRows(file, rows, columns)
    if file.endswith((".jsonl", ".json")):
        return JsonlRows(file, rows)
    raise DataError(f"{file}: prompt data must be .jsonl or .parquet")
