"""Images, video and audio of a prompt: from placeholders in its text to the fields of a /generate request.

Where `<image>`, `<video>` or `<audio>` stands in the text of a message, the next item of that medium takes its place
as a content part, which the chat template turns into the model's own tokens. The engine gets the items beside the
tokens.
"""

from __future__ import annotations

import base64
import functools
import mimetypes
import os
import re
from collections.abc import Iterator
from typing import Any

MEDIA = ("image", "video", "audio")
_PLACEHOLDER = re.compile(r"<(image|video|audio)>")
_REMOTE = re.compile(r"(?:https?|s3|gs)://|data:")
_CACHED_FILES = 64
_LONGEST_PATH = 4096


def place_media(prompt: str | list[dict[str, Any]], media: dict[str, list]) -> str | list[dict[str, Any]]:
    """The prompt with its placeholders filled, in order.

    A message list gets content parts (`{"type": "image", "image": item}`); a part of such a type that is already there
    takes the next item as well, or keeps its own. A plain string is only checked: it goes to the model as it is.

    Raises:
        ValueError: there are not as many placeholders as items of a medium.
    """
    wanted = dict.fromkeys(MEDIA, 0)
    left = {kind: iter(media.get(kind, ())) for kind in MEDIA}

    def take(kind: str) -> Any:
        wanted[kind] += 1
        return next(left[kind], None)

    if isinstance(prompt, str):
        for match in _PLACEHOLDER.finditer(prompt):
            take(match.group(1))
        filled: str | list[dict[str, Any]] = prompt
    else:
        filled = [
            {**m, "content": _fill(m["content"], take)} if isinstance(m, dict) and "content" in m else m
            for m in prompt
        ]
    for kind, count in wanted.items():
        have = len(media.get(kind, ()))
        if count != have:
            raise ValueError(f"the text has {count} <{kind}> placeholders for {have} {kind} items")
    return filled


def _fill(content: Any, take) -> Any:
    if isinstance(content, str):
        parts = list(_split(content, take))
        return parts if any(part["type"] != "text" for part in parts) else content
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            parts += _split(part.get("text", ""), take)
        elif kind in MEDIA and part.get(kind) is None:
            parts.append({**part, kind: take(kind)})
        else:
            parts.append(part)
    return parts


def _split(text: str, take) -> Iterator[dict[str, Any]]:
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        if match.start() > position:
            yield {"type": "text", "text": text[position : match.start()]}
        kind = match.group(1)
        yield {"type": kind, kind: take(kind)}
        position = match.end()
    if position < len(text) or not text:
        yield {"type": "text", "text": text[position:]}


def items_of(column: Any) -> list[Any]:
    """A column's value as a list of items; nothing and empty text are none."""
    if column is None or column == "":
        return []
    return list(column) if isinstance(column, (list, tuple)) else [column]


def request_fields(media: dict[str, list] | None) -> dict[str, list]:
    """`image_data`, `video_data` and `audio_data` of SGLang's /generate; files are sent as base64.

    An item is a URL, a `data:` URI, base64 text, a path, bytes, or a dict that holds one of these under its medium's
    name, `url`, `path` or `bytes`.

    Raises:
        ValueError: an item that is none of these; FileNotFoundError, naming the path: a file that is not there.
    """
    return {
        f"{kind}_data": [_encoded(kind, item) for item in media[kind]] for kind in MEDIA if media and media.get(kind)
    }


def _encoded(kind: str, item: Any) -> str:
    if isinstance(item, dict):
        for key in (kind, f"{kind}_url", "url", "bytes", "path"):
            if item.get(key) is not None:
                return _encoded(kind, item[key])
        raise ValueError(f"{kind}: nothing usable in an object with the keys {sorted(item)}")
    if isinstance(item, bytes):
        return base64.b64encode(item).decode()
    if not isinstance(item, str):
        raise ValueError(f"{kind}: must be a URL, path, base64 text or an object, not a {type(item).__name__}")
    if _REMOTE.match(item):
        return item
    path = item.removeprefix("file://")
    if len(path) < _LONGEST_PATH and (os.path.splitext(path)[1] or os.path.isfile(path)):
        return _file(kind, path)
    return item


@functools.lru_cache(maxsize=_CACHED_FILES)
def _file(kind: str, path: str) -> str:
    with open(path, "rb") as file:
        data = base64.b64encode(file.read()).decode()
    return f"data:{mimetypes.guess_type(path)[0] or f'{kind}/*'};base64,{data}"
