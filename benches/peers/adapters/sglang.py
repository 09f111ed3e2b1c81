"""SGLang's Rust radix tree, by its binding, without the Python class around it.

It is the index alone. An allocator beside it chooses the slots of a prompt, which is not
timed. So this is less work than a block manager's, in SGLang's favour: cold is a match that finds
nothing and the insertion of slots made before; hot is a match, a lock, and the unlock at the end.
Eviction in a full pool is not timed either, except in the class that says so.

The extension is one shared object. It is loaded by its path, because the package around it imports
half of SGLang.
"""

# ruff: noqa: D102 (base.py says what each method does)

import importlib.util
import sysconfig
from array import array
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # its libraries have to be loaded before the extension

from benches.peers.adapters.base import PREFILL, Manager, Tokens

VERSION = version("sglang")
FULL = 0  # ComponentType.FULL


def load_core() -> ModuleType:
    """The extension for this Python."""
    folder = Path(sysconfig.get_path("purelib"), "sglang/srt/mem_cache/rust_tree_core")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = folder / f"mem_cache{suffix}"
    if not path.exists():
        raise ImportError(f"no {path.name} in the wheel of sglang {VERSION}")
    spec = importlib.util.spec_from_file_location("mem_cache", path)
    assert spec is not None and spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core


torch.set_num_threads(1)  # else copies of long tensors wait for a second thread
core = load_core()


class Sglang(Manager):
    """Match and insert; match, lock and unlock. Pages as large as the others' blocks."""

    name = "SGLang Rust core"
    works = frozenset({PREFILL})

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.capacity = num_blocks * block_size
        self.page = block_size
        settings = core.TreeCoreInitParamsBinding(
            eviction_policy="lru", page_size=block_size, device="cpu"
        )
        self.tree = core.RustUnifiedTreeCoreBinding(settings, [FULL])
        self.slots = torch.arange(0, dtype=torch.int64)

    def prompt(self, tokens: Tokens) -> Any:
        key = array("q")
        key.frombytes(tokens[: len(tokens) // self.page * self.page].tobytes())
        if len(self.slots) != len(key):
            self.slots = torch.arange(len(key), dtype=torch.int64)
        return key, self.slots

    def cold(self, prompt: Any) -> None:
        key, slots = prompt
        self.tree.match_prefix(core.MatchParamsBinding(key=key))
        self.tree.insert(core.InsertParamsBinding(key=key, value=slots))

    def hot(self, prompt: Any) -> None:
        node = self.tree.match_prefix(core.MatchParamsBinding(key=prompt[0])).last_device_node_id
        lock = self.tree.inc_lock_ref(node)
        unlock = core.DecLockRefParamsBinding(
            node_id=lock.node_id,
            skipped_lock_components=lock.skipped_lock_components,
            component_lock_uuids=lock.component_lock_uuids,
            component_host_lock_uuids=lock.component_host_lock_uuids,
        )
        self.tree.dec_lock_ref(node, unlock)

    def evict_excess(self) -> None:
        excess = self.tree.total_size()[0] - self.capacity
        if excess > 0:
            self.evict(excess)

    def evict(self, count: int) -> None:
        """The loop of SGLang's `UnifiedRadixCache`, for one component and no host cache."""
        tree, freed = self.tree, {FULL: 0}
        tree.evict_device_start(FULL, count)
        while freed[FULL] < count:
            step = tree.evict_device_next_node(FULL, freed)
            freed[FULL] += step.tracker.get(FULL, 0)
            if step.node_id is not None:
                freed[FULL] += tree.evict_device_leaf(step.node_id).tracker.get(FULL, 0)
            elif not step.made_progress:
                break
        tree.evict_device_end(FULL)


class SglangEvicting(Sglang):
    """Eviction is timed too, as it is for the block managers."""

    name = "SGLang Rust core, evicting"

    def cold(self, prompt: Any) -> None:
        super().cold(prompt)
        self.evict_excess()


MANAGERS = [Sglang, SglangEvicting]
