"""Weights that change while an engine runs, and the memory of one that sleeps.

An update is staged beside the steps, by the thread that asks for it; between two steps the new
weights take the place of the old ones, and all cached KV becomes that of an earlier version.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TypeAlias

from pyengine.engine.changes import Change, ChangeMode, Outcome
from pyengine.engine.core import Engine
from pyengine.engine.input_processor import InputProcessor
from pyengine.errors import ConfigurationError, EngineAsleepError, WeightUpdateError
from pyengine.kv_cache import BlockManager
from pyengine.kv_cache.memory import give_back_freed_memory
from pyengine.kv_cache.pool import KVPool
from pyengine.models.decoder.model import DecoderModel
from pyengine.models.decoder.update import NamedTensors, StagedWeights
from pyengine.models.loaded import LoadedModel

NewWeights: TypeAlias = NamedTensors | str | Path
"""A folder with all weights, or tensors by name."""

ASLEEP: dict[int, frozenset[str]] = {
    1: frozenset({"kv_cache"}),
    2: frozenset({"kv_cache", "weights"}),
}
"""The parts that an engine drops at each level of sleep."""

_Properties: TypeAlias = tuple[tuple[str, bytes], ...]


class WeightChanges:
    """Replaces the weights of an engine, and drops them and its pool and brings them back.

    One change at a time: a second one is refused.
    """

    def __init__(  # noqa: PLR0913
        self,
        engine: Engine,
        loaded: LoadedModel,
        manager: BlockManager,
        processor: InputProcessor,
        *,
        pool: KVPool | None,
        rekey: Callable[[_Properties], None] | None = None,
        refusal: str = "",
    ) -> None:
        """`rekey` tells a store the properties of new weights. `refusal` is why the engine cannot
        sleep; empty: it can. Without a `pool` here the model is divided."""
        self._engine, self._loaded, self._manager = engine, loaded, manager
        self._processor, self._pool = processor, pool
        self._rekey, self._refusal = rekey, refusal
        self._properties: _Properties = loaded.properties
        self._lock = Lock()
        """Held by the one change that is under way."""

    def update(
        self, weights: NewWeights, mode: ChangeMode, send: Callable[[Change], None]
    ) -> Outcome:
        """Stage new weights, and have them put in place between two steps.

        `send` hands a change to the engine. The outcome gets the new version. Raises
        `WeightUpdateError` for weights that cannot be used.
        """
        self._begin()
        try:
            if self._engine.asleep:
                raise EngineAsleepError(
                    "the engine sleeps: wake it up first, with wake_up(weights=...) if these are "
                    "to be its weights"
                )
            staged = self._staged(weights)
        except BaseException:
            self._lock.release()
            raise
        return self._send(lambda: self._put(staged), mode, send)

    def sleep(self, level: int, mode: ChangeMode, send: Callable[[Change], None]) -> Outcome:
        """Drop the KV pool (level 1) and the weights (level 2) between two steps."""
        if self._refusal or self._pool is None:
            raise ConfigurationError(
                self._refusal or "a model that is divided over processes cannot sleep"
            )
        self._begin()
        return self._send(lambda: self._drop(ASLEEP[level]), mode, send)

    def wake_up(
        self,
        tags: frozenset[str],
        weights: NewWeights | None,
        send: Callable[[Change], None],
    ) -> Outcome:
        """Bring the weights and the pool back, as far as `tags` say.

        Weights are read from their files; with `weights` these are read instead.
        """
        self._begin()
        try:
            staged = None
            if "weights" in self._engine.asleep & tags:
                staged = self._reread() if weights is None else self._staged(weights)
            elif weights is not None:
                raise WeightUpdateError("the engine has its weights: use update_weights")
        except BaseException:
            self._lock.release()
            raise
        is_new = weights is not None
        return self._send(lambda: self._restore(tags, staged, is_new), "keep", send)

    def reset_prefix_cache(self, send: Callable[[Change], None]) -> Outcome:
        """Drop all cached blocks. Requests that have begun go on."""
        self._begin()
        return self._send(self._reset, "keep", send)

    def _reset(self) -> int:
        """Make all KV so far that of an earlier version of the block manager's."""
        self._manager.advance_weights_version()
        self._engine.drop_kept()
        self._processor.forget_results()
        if self._rekey is not None:
            self._rekey(self._properties)
        return self._engine.weights_version

    def _begin(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise WeightUpdateError(
                "another update, sleep or wake-up is under way: call again when it has ended"
            )

    def _send(
        self, apply: Callable[[], int], mode: ChangeMode, send: Callable[[Change], None]
    ) -> Outcome:
        outcome: Outcome = _Released(self._lock)
        try:
            send(Change(apply, mode, outcome))
        except BaseException:
            self._lock.release()
            raise
        return outcome

    @property
    def _model(self) -> DecoderModel:
        model = self._loaded.model
        if not isinstance(model, DecoderModel):
            raise WeightUpdateError(
                f"{self._loaded.name} runs as transformers' module: its weights are not replaced"
            )
        return model

    def _staged(self, weights: NewWeights) -> StagedWeights:
        return self._model.stage(weights, with_digests=self._rekey is not None)

    def _reread(self) -> StagedWeights:
        return self._model.reread()

    def _put(self, staged: StagedWeights) -> int:
        """Put staged weights in place; the engine's thread calls this, while no step is open."""
        self._reset()
        self._model.replace(staged)
        if self._rekey is not None:
            self._properties = _replaced(self._properties, staged)
            self._rekey(self._properties)
        return self._engine.weights_version + 1

    def _drop(self, what: frozenset[str]) -> int:
        if self._engine.asleep:
            raise EngineAsleepError("the engine sleeps already: wake it up first")
        assert self._pool is not None
        self._engine.recompute_all()
        self._reset()
        self._pool.give_back()
        if "weights" in what:
            self._model.drop()
        self._engine.asleep = what
        gc.collect()
        give_back_freed_memory()
        return self._engine.weights_version

    def _restore(self, tags: frozenset[str], staged: StagedWeights | None, is_new: bool) -> int:
        version = self._engine.weights_version
        if staged is not None and is_new:
            version = self._put(staged)
        elif staged is not None:
            self._model.replace(staged)
        self._engine.asleep -= tags
        return version


class _Released(SimpleQueue[int | Exception]):
    """An outcome that ends the change with its first item."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    def put(self, item: int | Exception, block: bool = True, timeout: float | None = None) -> None:
        """See `SimpleQueue.put`."""
        self._lock.release()
        super().put(item)


def _replaced(properties: _Properties, staged: StagedWeights) -> _Properties:
    """The properties of a model with other weights."""
    new = tuple(("weights", digest) for digest in staged.digests)
    if not staged.is_whole:
        return properties + new
    return (*(pair for pair in properties if pair[0] != "weights"), *new)
