"""Layer groups: which layers of a model share a block table. Plain arithmetic, no torch.

A layer whose attention slides needs the last tokens only. In a model that mixes such layers with
full ones, one table for all of them keeps every block for the sake of the full layers. So layers
are put into groups. Each group has one block table, and a group whose layers slide releases blocks
that the window has passed.

All groups take blocks from one pool. That works because every group has the same number of layers,
`layers_per_group`, and hence blocks of the same bytes: a block holds `block_size` tokens of the
layers of its group. The tensors of the pool are those of *one* group, and the j-th layers of all
groups share the j-th of them::

    6 layers, every third one full          pool: 2 tensors, each [blocks, block_size, ...]

    group 0, full        layers 2 5         tensor 0 | tensor 1
    group 1, window 512  layers 0 1         block 7 is of group 1: tokens 32..47 of layers 0 and 1
    group 2, window 512  layers 3 4         block 8 is of group 0: tokens  0..15 of layers 2 and 5

Equal pages for unequal layers are an idea of vLLM's hybrid KV cache manager, and of Jenga (Zhang
et al., 2025, arXiv:2503.18292). The choice of the group size is ours.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pyengine.errors import ConfigurationError

Window = int | None
"""Tokens that a query sees, its own among them; None: all before it."""

_Shape = TypeVar("_Shape", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Location:
    """The group of a layer, and the tensor of the pool with its keys and values."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of a model in groups.

    `windows` has one entry per group, `locations` one per layer. A group may have fewer layers than
    `layers_per_group`: then its blocks do not use some tensors.
    """

    windows: tuple[Window, ...]
    layers_per_group: int
    locations: tuple[Location, ...]

    @classmethod
    def single(cls, num_layers: int, window: Window = None) -> "LayerGroups":
        """All layers in one group."""
        return cls((window,), num_layers, tuple(Location(0, layer) for layer in range(num_layers)))

    @property
    def layer_windows(self) -> tuple[Window, ...]:
        """The window of each layer's group, within which it keeps blocks."""
        return tuple(self.windows[location.group] for location in self.locations)

    def tensor_shapes(self, shapes: Sequence[_Shape]) -> list[_Shape]:
        """The shape of each of the pool's tensors, from the shapes of all layers.

        Raises `ConfigurationError` if layers that are to share a tensor differ.
        """
        owners: dict[int, int] = {}
        for layer, location in enumerate(self.locations):
            owner = owners.setdefault(location.index, layer)
            if shapes[owner] != shapes[layer]:
                raise ConfigurationError(
                    f"layers {owner} and {layer} cannot share a KV tensor: "
                    f"{shapes[owner]} is not {shapes[layer]}"
                )
        return [shapes[owners[index]] for index in range(self.layers_per_group)]

    def __str__(self) -> str:
        """For people: `7 groups of 4 layers: 4 full, 22 of window 512`."""
        counts = Counter(self.layer_windows)
        kinds = ", ".join(
            f"{counts[window]} {'full' if window is None else f'of window {window}'}"
            for window in dict.fromkeys(self.windows)
        )
        groups, layers = len(self.windows), self.layers_per_group
        size = f"{groups} group{'s'[: groups - 1]} of {layers} layer{'s'[: layers - 1]}"
        return f"{size}: {kinds}"


def choose_layer_groups(
    windows: Sequence[Window], shapes: Sequence[Hashable], max_model_len: int
) -> LayerGroups:
    """Group layers so that a sequence of `max_model_len` tokens holds little memory.

    `windows` and `shapes` (of a layer's KV cache, only compared) have one entry per layer.

    A group has layers of one window. With n layers of a kind and L to a group, that kind takes
    ceil(n / L) groups, whose unused tensors cost as much as layers. A small L wastes no memory but
    makes many groups, each with a block table. The choice is the L with the smallest sum of memory
    and groups, where one more group must save one percent of that memory. For gemma-3-1b
    (4 full layers, 22 of window 512) that is L = 4: one full group and six sliding ones.

    All layers stay in one group, with the widest window of all, if that is the smallest sum, or if
    shapes differ. A window of `max_model_len` or more is no window.
    """
    kinds = [None if window is None or window >= max_model_len else window for window in windows]
    counts = Counter(kinds)
    order: list[Window] = [None] if None in counts else []  # the widest first
    order += sorted((window for window in counts if window is not None), reverse=True)
    single = LayerGroups.single(len(kinds), order[0])
    if len(order) == 1 or len(set(shapes)) > 1:
        return single
    tokens = {kind: kind or max_model_len for kind in order}
    needed = sum(tokens[kind] for kind in kinds)

    def cost(groups: LayerGroups) -> int:
        memory = groups.layers_per_group * sum(tokens[window] for window in groups.windows)
        return 100 * memory + needed * len(groups.windows)

    sizes = range(max(counts.values()), 0, -1)
    return min([single, *(_grouped(kinds, order, size) for size in sizes)], key=cost)


def _grouped(kinds: Sequence[Window], order: Sequence[Window], size: int) -> LayerGroups:
    """Groups of `size` layers of one kind, with kinds in `order` and layers in theirs."""
    windows: list[Window] = []
    locations: dict[int, Location] = {}
    for kind in order:
        layers = [layer for layer, own in enumerate(kinds) if own == kind]
        for at, layer in enumerate(layers):
            if at % size == 0:
                windows.append(kind)
            locations[layer] = Location(len(windows) - 1, at % size)
    return LayerGroups(tuple(windows), size, tuple(locations[layer] for layer in range(len(kinds))))
