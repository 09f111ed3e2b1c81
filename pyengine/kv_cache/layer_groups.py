"""Layer groups: which layers of a model share a block table. Plain arithmetic, no torch.

A layer whose attention slides needs the last tokens only. In a model that mixes such layers with
full ones, one table for all of them keeps every block for the sake of the full layers. So layers
are put into groups. Each group has one block table, and a group whose layers slide releases blocks
that the window has passed.

All groups take blocks from one pool. That works because every group uses the same tensors, and so
blocks of the same bytes: a block holds `block_size` tokens of the layers of its group. The j-th
layers of all groups share the j-th tensor::

    6 layers, every third one full          pool: 2 tensors, each [blocks, block_size, ...]

    group 0, full        layers 2 5         tensor 0 | tensor 1
    group 1, window 512  layers 0 1         block 7 is of group 1: tokens 32..47 of layers 0 and 1
    group 2, window 512  layers 3 4         block 8 is of group 0: tokens  0..15 of layers 2 and 5

Equal pages for unequal layers are an idea of vLLM's hybrid KV cache manager, and of Jenga (Zhang
et al., 2025, arXiv:2503.18292). The choice of the group size is ours.

Layers may differ in the bytes of a token (Gemma 4: full layers have larger heads). Then a tensor's
block has several of the smaller layers side by side, its *parts*::

    layers 2 and 5 have twice the bytes     pool: 2 tensors

    group 0, full        layers 2 5         tensor 0 | tensor 1
    group 1, window 512  layers 0 1 3 4     tensor 0: layers 0 1 | tensor 1: layers 3 4

A layer sees its tensor as `[blocks * parts, block_size, ...]`: block b of its group is row
`b * parts + part`. So layers of different parts read by different *tables* (`part_tables`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

Window = int | None
"""Tokens that a query sees, its own among them; None: all before it."""

Size = tuple[int, int]
"""Bytes of the key and of the value of a token in a layer."""


@dataclass(frozen=True, slots=True)
class Location:
    """The group of a layer, and the tensor of the pool with its keys and values.

    A block of the tensor has `parts` layers of that size. This one is number `part`.
    """

    group: int
    index: int
    parts: int = 1
    part: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Table:
    """A block table as some layers read it: block b of `group` is `b * parts + part`."""

    group: int
    parts: int = 1
    part: int = 0


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of a model in groups.

    `windows` has one entry per group, `locations` one per layer. A group's layers may need fewer
    than `num_tensors` tensors of the pool: then its blocks do not use the others.
    """

    windows: tuple[Window, ...]
    num_tensors: int
    locations: tuple[Location, ...]

    @classmethod
    def single(cls, num_layers: int, window: Window = None) -> "LayerGroups":
        """All layers in one group."""
        return cls((window,), num_layers, tuple(Location(0, layer) for layer in range(num_layers)))

    @property
    def layer_windows(self) -> tuple[Window, ...]:
        """The window of each layer's group, within which it keeps blocks."""
        return tuple(self.windows[location.group] for location in self.locations)

    @property
    def has_parts(self) -> bool:
        """True if a block of some tensor has several layers of a group."""
        return any(location.parts > 1 for location in self.locations)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that layers read; without parts, that of each group."""
        if not self.has_parts:
            return tuple(Table(group) for group in range(len(self.windows)))
        used = {_table_of(location) for location in self.locations}
        return tuple(sorted(used))

    @property
    def layer_tables(self) -> tuple[int, ...]:
        """The index in `tables` of each layer's."""
        index = {table: at for at, table in enumerate(self.tables)}
        return tuple(index[_table_of(location)] for location in self.locations)

    @property
    def owners(self) -> list[int]:
        """The first layer of each tensor."""
        owners: dict[int, int] = {}
        for layer, location in enumerate(self.locations):
            owners.setdefault(location.index, layer)
        return [owners[index] for index in range(self.num_tensors)]

    def __str__(self) -> str:
        """For people: `7 groups of 4 layers: 4 full, 22 of window 512`.

        With parts: `3 groups of 3 tensors: 3 full, 12 of window 512`.
        """
        counts = Counter(self.layer_windows)
        kinds = ", ".join(
            f"{counts[window]} {'full' if window is None else f'of window {window}'}"
            for window in dict.fromkeys(self.windows)
        )
        groups, tensors = len(self.windows), self.num_tensors
        unit = "tensor" if self.has_parts else "layer"
        size = f"{groups} group{'s'[: groups - 1]} of {tensors} {unit}{'s'[: tensors - 1]}"
        return f"{size}: {kinds}"


def _table_of(location: Location) -> Table:
    return Table(location.group, location.parts, location.part)


def choose_layer_groups(
    windows: Sequence[Window], sizes: Sequence[Size], max_model_len: int
) -> LayerGroups:
    """Group layers so that a sequence of `max_model_len` tokens holds little memory.

    `windows` and `sizes` have one entry per layer.

    A group has layers of one window and size. With n layers of a kind and L to a group, that kind
    takes ceil(n / L) groups, whose unused places cost as much as layers. A small L wastes no memory
    but makes many groups, each with a block table. The choice is the L with the smallest sum of
    memory and tables, where one more table must save one percent of the memory that the layers
    need. For gemma-3-1b (4 full layers, 22 of window 512) that is L = 4: one full group and six
    sliding ones.

    Where sizes differ, L counts tensors, whose blocks have the least common multiple of the sizes.
    Some smaller tensors may follow, for a kind that would fill only a part of the last one.

    All layers stay in one group, with the widest window of all, if that is the smallest sum, or if
    keys and values of two layers differ in proportion. A window of `max_model_len` or more is no
    window.
    """
    kept = [None if window is None or window >= max_model_len else window for window in windows]
    order: list[Window] = [None] if None in kept else []  # the widest first
    order += sorted({window for window in kept if window is not None}, reverse=True)
    single = LayerGroups.single(len(kept), order[0])
    if len(order) == 1:
        return single
    tokens = {window: window or max_model_len for window in order}
    needed = sum(sum(size) * tokens[window] for window, size in zip(kept, sizes, strict=True))

    def cost(groups: LayerGroups) -> int:
        block = sum(groups.locations[owner].parts * sum(sizes[owner]) for owner in groups.owners)
        memory = block * sum(tokens[window] for window in groups.windows)
        return 100 * memory + needed * len(groups.tables)

    kinds = list(zip(kept, sizes, strict=True))
    by_width = sorted(dict.fromkeys(kinds), key=lambda kind: order.index(kind[0]))
    return min([single, *_candidates(kinds, by_width)], key=cost)


_Kind = tuple[Window, Size]


def _candidates(kinds: Sequence[_Kind], order: Sequence[_Kind]) -> Iterator[LayerGroups]:
    """Groups over each list of tensors that could be worth it, of which each is used."""
    sizes = list(dict.fromkeys(size for _, size in kinds))
    largest = _common_multiple(sizes)
    if largest is None:
        return
    places = {size: largest[0] // size[0] for size in sizes}
    if max(places.values()) > len(kinds):
        return
    most = max(-(-count // places[size]) for (_, size), count in Counter(kinds).items())
    smaller = [[size] * number for size in sizes for number in range(1, places[size])]
    for count in range(most, 0, -1):
        for tail in ([], *smaller):
            groups = _grouped(kinds, order, [largest] * count + tail)
            if len({location.index for location in groups.locations}) == groups.num_tensors:
                yield groups


def _common_multiple(sizes: Sequence[Size]) -> Size | None:
    """The smallest size that all divide, as often in keys as in values; None: there is none."""
    keys, values = sizes[0]
    if any(size[0] * values != size[1] * keys for size in sizes):
        return None
    multiple = lcm(*(size[0] for size in sizes))
    return multiple, multiple // keys * values


def _grouped(
    kinds: Sequence[_Kind], order: Sequence[_Kind], tensors: Sequence[Size]
) -> LayerGroups:
    """Groups over `tensors` of one kind each, with kinds in `order` and layers in theirs."""
    windows: list[Window] = []
    locations: dict[int, Location] = {}
    for kind in order:
        places = [
            (index, tensor[0] // kind[1][0], part)
            for index, tensor in enumerate(tensors)
            if tensor[0] % kind[1][0] == 0
            for part in range(tensor[0] // kind[1][0])
        ]
        layers = [layer for layer, own in enumerate(kinds) if own == kind]
        for at, layer in enumerate(layers):
            if at % len(places) == 0:
                windows.append(kind[0])
            locations[layer] = Location(len(windows) - 1, *places[at % len(places)])
    return LayerGroups(
        tuple(windows), len(tensors), tuple(locations[layer] for layer in range(len(kinds)))
    )
