"""Frames of the dashboard: a snapshot of the engine as one compact message without token ids.

Block columns are base64 of deflated little-endian integers. Namespaces are secrets (salts,
tenants), so the page gets short digests of them.
"""

import base64
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic, time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine.kv_cache import BLOCK_STATES, PoolSnapshot, PoolUsage

if TYPE_CHECKING:  # recordings are shown without torch
    from pyengine.engine.stats import EngineView, RequestView
    from pyengine.request.request import Request

Ints = npt.NDArray[np.int64]

MAX_NODES = 160
"""Pieces of the tree in a frame: those with most sequences, then with most blocks."""
MAX_NAMESPACES = 8
"""Namespaces with a separate colour: those with most blocks."""
_SHOWN_TOKENS, _SHOWN_CHARACTERS = 64, 200
"""Limits of the shown beginning of a prompt."""


def _column(data: bytes) -> Ints:
    return np.frombuffer(data, np.uint32).astype(np.int64)


def _packed(wide: list[Ints], narrow: list[npt.NDArray[Any]]) -> str:
    """Encode columns for the page: 16-bit ones, then 8-bit ones, values saturated."""
    columns = [np.minimum(column, 0xFFFF).astype("<u2") for column in wide]
    columns += [np.minimum(column, 0xFF).astype(np.uint8) for column in narrow]
    flat = b"".join([column.tobytes() for column in columns])
    return base64.b64encode(zlib.compress(flat, 1)).decode()


@dataclass(frozen=True, slots=True)
class Tree:
    """The prefix tree of the pool, split at every branching point into pieces.

    `keys` identify the pieces (`_key`) in order. `parents` is each one's parent piece, -1 at the
    root of a namespace; `depths` the number of block positions before it; `roots` the node of its
    namespace. `block_pieces` is the piece of each block, -1 without a hash; `block_depths` the
    number of positions before the block.
    """

    keys: Ints
    parents: Ints
    lengths: Ints
    depths: Ints
    roots: Ints
    block_pieces: Ints
    block_depths: Ints

    @classmethod
    def of(cls, pool: PoolSnapshot) -> "Tree":
        """Split the nodes of a snapshot at the positions to which children are attached."""
        # Node 0 means none; it is its own parent.
        parents, attached, lengths = (
            np.concatenate([[0], _column(data)])
            for data in (pool.parents, pool.parent_indices, pool.lengths)
        )
        depths, roots = _depths(parents, attached)
        nodes, indices = _column(pool.nodes), _column(pool.node_indices)
        inner = (attached > 0) & (attached < lengths[parents])
        full = np.flatnonzero(lengths > 0)
        keys = np.unique(np.concatenate([_key(full, 0), _key(parents[inner], attached[inner])]))
        own, start = keys >> 32, keys & 0xFFFFFFFF
        is_same = np.append(own[1:] == own[:-1], False) if len(keys) else np.zeros(0, bool)
        ends = np.where(is_same, np.append(start[1:], 0), lengths[own])
        above = np.searchsorted(keys, _key(parents[own], attached[own] - 1), "right") - 1
        above[attached[own] == 0] = -1  # the root of a namespace
        blocks = np.searchsorted(keys, _key(nodes, indices - 1), "right") - 1
        return cls(
            keys=keys,
            parents=np.where(start > 0, np.arange(len(keys)) - 1, above),
            lengths=ends - start,
            depths=depths[own] + start,
            roots=roots[own],
            block_pieces=np.where(nodes > 0, blocks, -1),
            block_depths=np.where(nodes > 0, depths[nodes] + indices - 1, 0),
        )


def _key(nodes: Ints, indices: Any) -> Ints:
    return np.asarray((nodes << 32) + indices, np.int64)


def _depths(parents: Ints, attached: Ints) -> tuple[Ints, Ints]:
    """The number of positions before each node, and the node of its namespace."""
    depths, above = attached.copy(), parents.copy()
    roots = np.where(parents == 0, np.arange(len(parents)), parents)
    while above.any():  # pointer doubling
        depths += depths[above]
        roots = np.where(above > 0, roots[above], roots)
        above = above[above]
    return depths, roots


def pool_columns(pool: PoolSnapshot, usage: PoolUsage) -> tuple[dict[str, Any], Ints]:
    """The part of a frame that is about blocks and the prefix tree; the node number of each block.

    0 is the number of blocks that have no node, or a hidden one.
    """
    tree, seq_refs = Tree.of(pool), _column(pool.seq_refs)
    spaces, space_of_root = _namespaces(pool, tree)
    nodes, hidden, number_of = _nodes(tree, seq_refs, space_of_root)
    pieces = tree.block_pieces
    root_of_block = np.where(pieces >= 0, tree.roots[pieces] if len(tree.roots) else 0, 0)
    node_of_block = np.where(pieces >= 0, number_of[pieces], 0)
    columns = {
        "usage": {name: getattr(usage, name) for name in BLOCK_STATES},
        "blocks": _packed(
            [_column(pool.refs), seq_refs, _column(pool.ages), tree.block_depths],
            [np.frombuffer(pool.states, np.uint8), space_of_root[root_of_block], node_of_block],
        ),
        "spaces": spaces,
        "tree": nodes,
        "hidden": hidden,
    }
    return columns, node_of_block


class FrameMaker:
    """Creates the frames of one engine. Not thread-safe.

    With `decode`, from token ids to text, frames contain the beginning of each prompt.
    """

    def __init__(
        self, about: dict[str, object], decode: Callable[[list[int]], str] | None = None
    ) -> None:
        self._about = about
        self._decode = decode
        self._prompts: dict[Request, str] = {}
        """Beginnings of the prompts in the last frame."""

    def frame(self, view: "EngineView") -> str:
        """A frame as one line of JSON."""
        stats = view.stats
        if self._decode is not None:
            self._prompts = {
                request.request: self._prompt(request.request) for request in view.requests
            }
        columns, node_of_block = pool_columns(view.pool, stats.usage)
        message = {
            "time": time(),
            "about": self._about,
            "counters": stats.counters,
            "store": stats.store,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "preemptions": stats.num_preemptions,
            "tokens": stats.num_new_tokens,
            "requests": [self._request(request, node_of_block) for request in view.requests],
        } | columns
        return json.dumps(message, separators=(",", ":"))

    def _request(self, view: "RequestView", node_of_block: Ints) -> list[Any]:
        """A row of the request table, in the page's column order."""
        state = view.request
        row: list[Any] = [
            state.request_id,
            int(view.is_running),
            view.num_prompt,
            view.num_cached,
            min(view.num_computed, view.num_prompt),
            view.num_output,
            view.max_output,
            view.num_preemptions,
            round(monotonic() - view.arrival_time, 3),
            _digest(state.namespace),
            _miss(state, node_of_block),
        ]
        if self._decode is not None:
            row.append(self._prompts[state])
        return row

    def _prompt(self, state: "Request") -> str:
        """The beginning of a prompt, decoded once per request."""
        known = self._prompts.get(state)
        if known is not None:
            return known
        if state.prompt is not None:
            return state.prompt[:_SHOWN_CHARACTERS]
        assert self._decode is not None
        ids = [int(token) for token in state.prompt_token_ids[:_SHOWN_TOKENS]]
        return self._decode(ids)[:_SHOWN_CHARACTERS]


def _miss(request: "Request", node_of_block: Ints) -> list[Any] | None:
    """Where a request left the cached prefix: reason, position, node; None before that is known."""
    cache = request.result.cache
    if cache is None:
        return None
    block = request.result.last_reused_block
    node = 0 if block is None or block >= len(node_of_block) else int(node_of_block[block])
    return [cache.reason, cache.position, node]


def _digest(namespace: bytes) -> str:
    """A short name of a namespace that does not reveal it."""
    return blake2b(namespace, digest_size=3, key=_KEY).hexdigest() if namespace else "default"


_KEY = os.urandom(16)
"""Random per process, so digests cannot be looked up."""


def _namespaces(pool: PoolSnapshot, tree: Tree) -> tuple[list[dict[str, Any]], Ints]:
    """The namespaces, most blocks first, and their numbers by node.

    Numbers start at 1; 0 means none. Namespaces without a colour share the last number.
    """
    names = pool.namespaces
    counts = np.bincount(tree.roots[tree.block_pieces[tree.block_pieces >= 0]])
    numbers = np.zeros(
        int(np.append(tree.roots, [0, *(at for at, _ in names)]).max()) + 1, np.int64
    )
    namespaces = [(int(counts[at]) if at < len(counts) else 0, at, name) for at, name in names]
    namespaces.sort(key=lambda entry: (-entry[0], entry[2]))
    spaces: list[dict[str, Any]] = []
    for number, (blocks, at, name) in enumerate(namespaces, start=1):
        numbers[at] = min(number, MAX_NAMESPACES + 1)
        if number <= MAX_NAMESPACES:
            spaces.append({"name": _digest(name), "blocks": blocks})
        elif number == MAX_NAMESPACES + 1:
            spaces.append({"name": f"{len(namespaces) - MAX_NAMESPACES} others", "blocks": blocks})
        else:
            spaces[-1]["blocks"] += blocks
    return spaces, numbers


def _nodes(
    tree: Tree, seq_refs: Ints, space_of_root: Ints
) -> tuple[list[list[int]], list[int], Ints]:
    """The nodes of a frame, parents first; counts of hidden root pieces and their blocks; and the
    number of each piece, from 1, or 0 if it is hidden.

    A node is [parent (0: none), namespace, positions before it, positions in it, its blocks, its
    sequences, hidden descendants, blocks of those, first block]. The first block identifies a node
    across frames.
    """
    count = len(tree.keys)
    known = tree.block_pieces >= 0
    pieces = tree.block_pieces[known]
    blocks = np.bincount(pieces, minlength=count)
    sequences = np.zeros(count, np.int64)
    np.maximum.at(sequences, pieces, seq_refs[known])
    children = np.bincount(tree.parents[tree.parents >= 0], minlength=count)
    order = np.lexsort((-blocks, -children.clip(max=2), -sequences))[:MAX_NODES]
    shown: dict[int, None] = {}
    for piece in order.tolist():
        way = [piece]
        while tree.parents[way[-1]] >= 0 and int(tree.parents[way[-1]]) not in shown:
            way.append(int(tree.parents[way[-1]]))
        if len(shown) + len(way) > 255:  # a node's number is a byte
            continue
        shown.update(dict.fromkeys(reversed(way)))
    number_of = np.zeros(count + 1, np.int64)  # the last entry is for blocks without a hash
    if shown:
        number_of[list(shown)] = np.arange(1, len(shown) + 1)
    hidden, hidden_blocks = _hidden(tree, number_of, blocks)
    firsts = np.full(count, len(seq_refs), np.int64) + np.arange(count)  # for pieces without blocks
    np.minimum.at(firsts, pieces, np.flatnonzero(known))
    nodes = [
        [
            int(number_of[tree.parents[piece]]) if tree.parents[piece] >= 0 else 0,
            int(space_of_root[tree.roots[piece]]),
            int(tree.depths[piece]),
            int(tree.lengths[piece]),
            int(blocks[piece]),
            int(sequences[piece]),
            int(hidden[number]),
            int(hidden_blocks[number]),
            int(firsts[piece]),
        ]
        for number, piece in enumerate(shown, start=1)
    ]
    return nodes, [int(hidden[0]), int(hidden_blocks[0])], number_of


def _hidden(tree: Tree, number_of: Ints, blocks: Ints) -> tuple[Ints, Ints]:
    """By node number (0: none): the count of hidden descendants, and of their blocks."""
    count = len(tree.keys)
    above = np.where(tree.parents >= 0, tree.parents, count)
    # The nearest shown ancestor, or `count` if there is none, by pointer doubling.
    owner = np.append(np.where(number_of[:count] > 0, np.arange(count), above), count)
    while True:
        further = owner[owner]
        if (further == owner).all():
            break
        owner = further
    hidden = number_of[:count] == 0
    numbers = number_of[owner[:count][hidden]]
    size = int(number_of.max(initial=0)) + 1
    return (
        np.bincount(numbers, minlength=size),
        np.bincount(numbers, weights=blocks[hidden], minlength=size).astype(np.int64),
    )
