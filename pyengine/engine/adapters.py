"""LoRA adapters of an engine: those that are registered, and the slots of those in a step."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import numpy as np

from pyengine.engine.parts import EnginePart
from pyengine.errors import AdapterError
from pyengine.models.adapters import NO_SLOT, Adapter, AppliedAdapter, StepAdapters
from pyengine.models.decoder.adapters import AdapterTables
from pyengine.models.peft import read_adapter
from pyengine.request.lora import LoRARequest, checked_name
from pyengine.request.prompts import Prompt
from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler

_MARK = b"\xfflora "
"""Begins namespaces of adapters: no text in UTF-8 has this byte, so no salt does."""


@dataclass(frozen=True, slots=True)
class LoadedLoRA:
    """A registered adapter: its name, its folder, and the digest of its content."""

    lora_name: str
    lora_path: str
    digest: str


class AdapterRegistry:
    """Adapters by name. Any thread may call it.

    A request keeps the content that it began with, whatever its name has afterwards.
    """

    def __init__(self, tables: AdapterTables, max_registered: int | None = None) -> None:
        self._tables, self._max = tables, max_registered
        self._lock = Lock()
        self._adapters: dict[str, tuple[str, Adapter]] = {}

    def add(self, request: LoRARequest) -> Adapter:
        """Read an adapter and register it, in the place of another one of its name.

        Raises `AdapterError` if it cannot be served, and if too many are registered.
        """
        if request.lora_path is None:
            raise AdapterError(f"the adapter {request.lora_name!r} has no lora_path: give one")
        with self._lock:
            self._check_number(request.lora_name)
        path = str(Path(request.lora_path).absolute())
        adapter = read_adapter(path, self._tables)
        with self._lock:
            self._check_number(request.lora_name)
            known = (other for _, other in self._adapters.values())
            same = (other for other in known if other.digest == adapter.digest)
            adapter = next(same, adapter)  # one copy in memory
            self._adapters[request.lora_name] = path, adapter
        return adapter

    def _check_number(self, name: str) -> None:
        is_new = name not in self._adapters
        if self._max is not None and is_new and len(self._adapters) >= self._max:
            raise AdapterError(
                f"{len(self._adapters)} adapters are loaded and max_cpu_loras={self._max}: unload "
                "one, or raise max_cpu_loras"
            )

    def get(self, request: LoRARequest) -> Adapter:
        """The adapter of a request, which is loaded if it is not, or was from another folder."""
        with self._lock:
            path, adapter = self._adapters.get(request.lora_name, (None, None))
        if adapter is not None:
            own = request.lora_path
            if own is None or str(Path(own).absolute()) == path:
                return adapter
        elif request.lora_path is None:
            raise AdapterError(f"no adapter {request.lora_name!r} is loaded: give its path")
        return self.add(request)

    def remove(self, name: str) -> bool:
        """Forget an adapter; running requests keep it. False if there is none of this name."""
        with self._lock:
            return self._adapters.pop(checked_name(name), None) is not None

    def list(self) -> Sequence[LoadedLoRA]:
        """The registered adapters, in the order of their loading."""
        with self._lock:
            return [
                LoadedLoRA(name, path, adapter.digest.hex())
                for name, (path, adapter) in self._adapters.items()
            ]


class AdapterSlots(EnginePart):
    """The slots of adapters in the model's tables. The engine's thread calls it.

    A sequence is admitted if its adapter has a slot: at most `max_loras` adapters run at a time. If
    one has to wait, further sequences with adapters wait behind it until a slot is free, so
    that none waits forever. Sequences of the base model pass. Adapters that no longer run
    keep their slots until others need them, least recently used first.
    """

    def __init__(self, max_loras: int) -> None:
        self._max = max_loras
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._admissible: set[bytes] = set()
        """The adapters that may be in the step that is planned."""
        self._is_full = False
        """True once a sequence has to wait for a slot in this step."""

    def before_plan(self, scheduler: Scheduler, _previous: ScheduledStep | None) -> None:
        """Look up the adapters of running sequences."""
        applied = [sequence.request.adapter for sequence in scheduler.running]
        self._admissible = {each.adapter.digest for each in applied if each is not None}
        self._is_full = False

    def is_held(self, sequence: SequenceState) -> bool:
        """True if a waiting sequence has to wait for a slot."""
        applied = sequence.request.adapter
        if applied is None:
            return False
        digest = applied.adapter.digest
        has_slot = digest in self._admissible or len(self._admissible) < self._max
        if self._is_full or not has_slot:
            self._is_full = True
            return True
        self._admissible.add(digest)
        return False

    def of(self, step: ScheduledStep) -> StepAdapters:
        """The slots of a step's tokens."""
        sequences = step.sequences
        applied = [sequence.request.adapter for sequence in sequences]
        needed = {each.adapter.digest: each.adapter for each in applied if each is not None}
        for digest in needed:
            if digest in self._slots:
                self._slots.move_to_end(digest)
        for digest in needed:
            if digest not in self._slots:
                slot = len(self._slots)
                if slot == self._max:
                    _, slot = self._slots.popitem(last=False)
                self._slots[digest] = slot
        slots: list[int] = []
        counts: list[int] = []
        for sequence, of in zip(step.decodes, applied, strict=False):
            slots.append(self._slot_of(of))
            counts.append(1 + len(step.drafts.get(sequence, ())))
        for entry, of in zip(step.chunks, applied[len(step.decodes) :], strict=True):
            before = 0 if of is None else min(max(0, of.start - entry.start), entry.num_tokens)
            slots += [NO_SLOT, self._slot_of(of)]
            counts += [before, entry.num_tokens - before]
        of_tokens = np.repeat(np.array(slots, np.int32), counts)
        contents = {self._slots[digest]: adapter for digest, adapter in needed.items()}
        return StepAdapters(of_tokens, contents)

    def _slot_of(self, applied: AppliedAdapter | None) -> int:
        return NO_SLOT if applied is None else self._slots[applied.adapter.digest]


def with_adapter(prompt: Prompt, adapter: Adapter) -> Prompt:
    """A prompt for an adapter, in the namespace of its content; unchanged if it has no effect.

    Before the tokens that activate an adapter, blocks are those of the base model.
    """
    start = adapter.start(prompt.token_ids)
    if start is None:
        return prompt
    name, applied = _MARK + adapter.digest, AppliedAdapter(adapter, start)
    if adapter.invocation_tokens is not None:
        return replace(prompt, switch=(start, name), adapter=applied)
    return replace(prompt, namespace=name + prompt.namespace, adapter=applied)
