"""Texts of conversations and the exact tokens that they are made of.

A conversation grows by pieces: a prompt, a response, the next turn, ... Each piece is an `Entry` that knows its tokens
and the entry before it. A compressed character tree finds the longest known beginning of a text. Only the index is cut
at arbitrary characters; the tokens of a piece never are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Entry:
    """A piece of a conversation. Per-token lists have the length of `tokens`."""

    parent: Entry | None
    text_length: int
    """Characters from the start of the conversation to the end of this piece."""
    tokens: list[int]
    log_probs: list[float]
    loss_mask: list[int]
    version: int | None
    """Weight version that was current when it was made."""
    tail: Entry | None = None
    """Generated special tokens behind the piece that the client does not see as text, e.g. the end of turn."""

    def chain(self) -> list[Entry]:
        """The pieces from the start of the conversation to this one."""
        pieces: list[Entry] = []
        entry: Entry | None = self
        while entry is not None:
            pieces.append(entry)
            entry = entry.parent
        return pieces[::-1]

    def all_tokens(self) -> list[int]:
        return [token for piece in self.chain() for token in piece.tokens]


@dataclass
class _Node:
    """`edge` leads here from the parent node; `entry` is the piece whose text ends here."""

    edge: str
    entry: Entry | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    """By the first character of their edge."""


class RadixTree:
    """Index of entries by their text.

    Args:
        max_entries: beyond these, entries that are older than `keep_versions` weight versions are dropped.
    """

    def __init__(self, max_entries: int = 10_000, keep_versions: int = 5) -> None:
        self.max_entries = max_entries
        self.keep_versions = keep_versions
        self.num_entries = 0
        self.version: int | None = None
        """The newest weight version seen."""
        self._root = _Node("")
        self._collected_at = 0

    def find(self, text: str) -> Entry | None:
        """The entry of the longest beginning of `text` that is known."""
        node, position, best = self._root, 0, None
        while position < len(text):
            child = node.children.get(text[position])
            if child is None or not text.startswith(child.edge, position):
                break
            node, position = child, position + len(child.edge)
            best = node.entry or best
        return best

    def insert(
        self,
        text: str,
        parent: Entry | None,
        tokens: list[int],
        log_probs: list[float],
        loss_mask: list[int],
        version: int | None,
    ) -> Entry:
        """Make `text` known: what `parent` stands for, followed by these tokens. The newer of two equal texts stays.

        Raises:
            ValueError: lists of different lengths.
        """
        if not len(tokens) == len(log_probs) == len(loss_mask):
            raise ValueError(f"{len(tokens)} tokens, {len(log_probs)} log-probs, {len(loss_mask)} mask values")
        entry = Entry(parent, len(text), tokens, log_probs, loss_mask, version)
        node = self._node(text)
        self.num_entries += node.entry is None
        node.entry = entry
        self._advance(version)
        return entry

    def _node(self, text: str) -> _Node:
        """The node at the end of `text`; edges are split on the way."""
        node, position = self._root, 0
        while position < len(text):
            child = node.children.get(text[position])
            if child is None:
                child = node.children[text[position]] = _Node(text[position:])
                return child
            shared = _shared_prefix(child.edge, text, position)
            if shared < len(child.edge):
                middle = _Node(child.edge[:shared], children={child.edge[shared]: child})
                child.edge = child.edge[shared:]
                node.children[text[position]] = child = middle
            node, position = child, position + shared
        return node

    def _advance(self, version: int | None) -> None:
        newer = version is not None and (self.version is None or version > self.version)
        if newer:
            self.version = version
        if self.num_entries > self.max_entries and (newer or self.num_entries > 1.1 * self._collected_at):
            self.collect()

    def collect(self) -> int:
        """Drop entries that are too old and that no newer entry continues; how many."""
        before = self.num_entries
        if self.version is not None:
            oldest = self.version - self.keep_versions
            needed = {id(e) for entry in self._entries() if _is_fresh(entry, oldest) for e in entry.chain()}
            self._prune(needed)
        self._collected_at = self.num_entries
        return before - self.num_entries

    def _entries(self) -> Iterator[Entry]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.entry is not None:
                yield node.entry

    def _prune(self, needed: set[int]) -> None:
        """Remove entries that are not needed, nodes that lead nowhere, and joints with one way on."""
        order, stack = [], [self._root]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):
            for first, child in list(node.children.items()):
                if child.entry is None and not child.children:
                    del node.children[first]
                elif child.entry is None and len(child.children) == 1:
                    (grandchild,) = child.children.values()
                    grandchild.edge = child.edge + grandchild.edge
                    node.children[first] = grandchild
            if node.entry is not None and id(node.entry) not in needed:
                node.entry = None
                self.num_entries -= 1


def _is_fresh(entry: Entry, oldest: int) -> bool:
    return entry.version is None or entry.version >= oldest


def _shared_prefix(edge: str, text: str, position: int) -> int:
    """Length of the common beginning of `edge` and `text[position:]`, by bisection over string comparisons."""
    low, high = 1, min(len(edge), len(text) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(edge[:middle], position):
            low = middle
        else:
            high = middle - 1
    return low
