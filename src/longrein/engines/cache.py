"""One prefix tree of keys and values for all rollouts.

A node holds the keys and values of a run of tokens; a path from the root is a token sequence. Whatever shares a prefix
shares its nodes. Invariant: a node's keys and values never change once computed, and a node in use by a running
sequence (locked) is never evicted.
"""

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from longrein.records import IntArray

# Longer runs become chains of nodes, so that a prefill pass can stop between two of them.
NODE_TOKENS = 2048


class Node:
    """A run of tokens below its parent.

    Attributes:
        tokens: (n,) int32.
        start: tokens before it on its path.
        keys_values: (L, 2, Hk, n, D), or None until computed.
        locks: running sequences whose path goes through it.
    """

    __slots__ = ("children", "keys_values", "locks", "parent", "start", "tokens", "used")

    def __init__(self, tokens: IntArray, start: int, parent: "Node | None") -> None:
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.keys_values: Tensor | None = None
        self.locks = 0
        self.used = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Tokens on the path up to and including this node."""
        return self.start + len(self.tokens)

    def computed(self) -> Tensor:
        """The keys and values, which must be there."""
        assert self.keys_values is not None, "a node is read before it was computed"
        return self.keys_values

    def path(self) -> "list[Node]":
        """The nodes from below the root to this one; empty for the root."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixCache:
    """The tree. ``capacity`` bounds the tokens it keeps once nothing is running."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._clock = itertools.count(1)
        self.clear()

    def clear(self) -> None:
        """Forget everything; running sequences must have ended."""
        self.root = Node(np.empty(0, np.int32), 0, None)
        self.tokens = 0
        self.locked_tokens = 0

    def match(self, tokens: IntArray) -> int:
        """How many leading tokens are in the tree. Changes nothing."""
        return sum(shared for _, shared in self._walk(tokens))

    def insert(self, tokens: IntArray) -> Node:
        """The node at which ``tokens`` end. What was missing is added, without keys and values; a node that only begins
        like the rest of ``tokens`` is split."""
        node = self.root
        for child, shared in self._walk(tokens):
            node = child if shared == len(child) else self._split(child, shared)
            node.used = next(self._clock)
        for start in range(node.end, len(tokens), NODE_TOKENS):
            piece = np.ascontiguousarray(tokens[start : start + NODE_TOKENS])
            child = Node(piece, start, node)
            child.used = next(self._clock)
            node.children[int(piece[0])] = child
            node = child
            self.tokens += len(piece)
        return node

    def lock(self, leaf: Node) -> None:
        """Keep the path to ``leaf``."""
        for node in leaf.path():
            if node.locks == 0:
                self.locked_tokens += len(node)
            node.locks += 1

    def unlock(self, leaf: Node) -> None:
        """Undo one ``lock``."""
        for node in leaf.path():
            node.locks -= 1
            if node.locks == 0:
                self.locked_tokens -= len(node)

    def evict(self) -> None:
        """Drop the least recently used unlocked leaves until the capacity holds."""
        heap = [(node.used, id(node), node) for node in self.nodes() if not node.children and node.locks == 0]
        heapq.heapify(heap)
        while self.tokens > self.capacity and heap:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.tokens[0])]
            self.tokens -= len(node)
            if parent is not self.root and not parent.children and parent.locks == 0:
                heapq.heappush(heap, (parent.used, id(parent), parent))

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _walk(self, tokens: IntArray) -> Iterator[tuple[Node, int]]:
        """(node, leading tokens shared with it) along the path; only the last may share less than all its tokens."""
        node, position = self.root, 0
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                return
            shared = _common(child.tokens, tokens[position:])
            whole = shared == len(child)  # asked before the caller may split it
            yield child, shared
            if not whole:
                return
            node, position = child, position + shared

    def _split(self, node: Node, at: int) -> Node:
        """Put a new node for the first ``at`` tokens above ``node``, which keeps the rest (and whoever holds it)."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.tokens[:at].copy(), node.start, parent)
        upper.locks, upper.used = node.locks, node.used
        parent.children[int(upper.tokens[0])] = upper
        if node.keys_values is not None:
            # Copies, not views: either half must give its memory back when it goes.
            upper.keys_values = node.keys_values[:, :, :, :at].clone()
            node.keys_values = node.keys_values[:, :, :, at:].clone()
        node.tokens = node.tokens[at:].copy()
        node.start += at
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper


def _common(one: IntArray, other: IntArray) -> int:
    """Length of the common beginning."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size
