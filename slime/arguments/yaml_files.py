"""YAML as users write it: no objects, and a key that is given twice is an error instead of the last one winning."""

from __future__ import annotations

import functools
from typing import IO, Any


def load_yaml(file: IO[str]) -> Any:
    """What an open file holds.

    Raises:
        yaml.YAMLError: no valid YAML, or a key twice; the message has line and column.
    """
    import yaml

    try:
        return yaml.load(file, _loader())
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None


@functools.cache
def _loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, str) and key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
                seen.add(key if isinstance(key, str) else id(key_node))
            return super().construct_mapping(node, deep)

    return Loader
