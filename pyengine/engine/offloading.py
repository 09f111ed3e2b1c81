"""KV outside the pool: stored when a prompt is computed or ends, restored while a request waits.

    waiting -> look up -> reserve -> [load thread] -> complete -> waiting, its prefix cached
    prompt computed, or sequence ended -> [store thread: pin, copy, release]

A block that the two threads read or write is held until they are done with it, whatever becomes
of the request. No step waits for them: a request whose prefix is being loaded stays in the queue,
others overtake it, and after `_PATIENCE` it is computed instead.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic, sleep, thread_time
from typing import Any, NamedTuple

from pyengine.engine.parts import EnginePart
from pyengine.engine.step_rows import SubmittedStep
from pyengine.kv_cache import (
    BlockManager,
    KVStore,
    Loading,
    NoRoom,
    StoredPrefix,
    StoreError,
    Transfer,
)
from pyengine.kv_cache import Sequence as KVSequence
from pyengine.kv_cache.block_memory import Block as _Block
from pyengine.kv_cache.block_memory import BlockMemory, end_of_piece
from pyengine.request.prompts import BlockSpace
from pyengine.request.request import Request, SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)

_LOOKAHEAD = 16
"""Maximum number of waiting sequences to look up before they can be admitted."""
_MAX_OTHER_MODELS = 16
"""Fingerprints of other models in which a prompt is looked up to explain a miss."""
_SHORT = 256
"""Fewer tokens are stored only if some of them were cached: they are used a second time."""
_PATIENCE = 10.0
"""Seconds without any progress after which loads, or a store, are abandoned."""
_LAST_WAIT = 20.0
"""Seconds after which a request ends that does not fit beside the blocks of abandoned loads."""
FLUSH_PATIENCE = 5.0
"""Seconds in which a store writes nothing after which a flush ends."""
_MAX_QUEUED_TOKENS = 1 << 20
"""Tokens beyond which no more may wait to be stored."""
_LOADING_SHARE = 0.5
"""Of the blocks that are free or evictable, at most, that one load takes."""
_GAIN = 0.8
"""A prefix is restored if that takes at most this fraction of the time to compute it."""
_FORGET = 60.0
"""Seconds after which a rate is measured again."""
_MIN_TOKENS = 64
"""Smaller steps say little about how fast a prompt is computed."""
_CHECK = 1.0
"""Seconds between checks for the store's notices and for entries of another process."""
_LOAD_REST, _STORE_REST, _NEW_STORE_REST = 10.0, 100.0, 600.0
"""Rests after each piece while steps run, as multiples of the processor time that it took.

Of a block that is stored that is the copy; the store's thread takes three times as long to write.
Copy and write together take a core for 4 % of the time, or 0.7 % while only prompts of which
nothing was cached wait to be stored: they may never be used again.
"""


class Rate:
    """Units per second lately; None before the first measurement and `_FORGET` after the last."""

    def __init__(self) -> None:
        self._value = self._time = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Count `amount` units that took `seconds`."""
        new = amount / max(seconds, 1e-9)
        self._value, before = new, self.value
        if before is not None:
            self._value = 0.75 * before + 0.25 * new
        self._time = monotonic()

    @property
    def value(self) -> float | None:
        """The rate now."""
        is_known = self._value and monotonic() - self._time < _FORGET
        return self._value if is_known else None

    @property
    def last(self) -> float | None:
        """The last rate, of whatever age."""
        return self._value or None


class _Backlog:
    """Tokens that wait to be stored. One thread adds them, another one removes them."""

    def __init__(self) -> None:
        self._added = self._removed = 0

    @property
    def num_tokens(self) -> int:
        """The tokens that wait, and those that are being stored."""
        return self._added - self._removed

    def add(self, num_tokens: int) -> None:
        """Count a sequence that waits."""
        self._added += num_tokens

    def remove(self, num_tokens: int) -> None:
        """Count a sequence that waits no longer."""
        self._removed += num_tokens


class Flush:
    """A wait until the queue of its beginning is written. See `KVOffloader.begin_flush`."""

    _PROGRESS = ("stored", "known", "dropped_failed", "relocated", "evicted", "queued_bytes")

    def __init__(self, store: KVStore, num_pins: Callable[[], int]) -> None:
        self.is_copied = Event()
        """Set once the store has got all blocks that were to be stored."""
        self._store, self._num_pins = store, num_pins
        self._progress: tuple[int, ...] = ()
        self._last_progress = monotonic()
        self.has_failed = False
        """True once the disk writes nothing."""

    def poll(self) -> bool | None:
        """True if all is written, False if the disk writes nothing; None while it does.

        It writes nothing if a write failed, does not return, or `FLUSH_PATIENCE` seconds were not
        enough for an entry.
        """
        try:
            if self.is_copied.is_set() and self._store.flush(0):
                return True
            stats = self._store.stats()
        except StoreError:  # it is closed
            return True
        progress = (self._num_pins(), *(stats[name] for name in self._PROGRESS))
        if progress != self._progress:
            self._progress, self._last_progress = progress, monotonic()
        is_late = monotonic() > self._last_progress + FLUSH_PATIENCE
        self.has_failed = bool(stats["is_suspended"] or stats["is_stalled"] or is_late)
        return False if self.has_failed else None


@dataclass(slots=True, eq=False)
class _Lookup:
    """The stored prefix of one sequence's tokens."""

    num_preemptions: int
    """Of its request when it was looked up: it is looked up again after each."""
    is_done: bool = False
    """The stored part of its tokens was restored, is missing, or is faster to compute."""
    prefix: StoredPrefix | None = None
    """The keys of its blocks in the store, once they were needed."""


@dataclass(slots=True, eq=False)
class _Load:
    """A transfer before, in or after the load thread."""

    sequence: SequenceState
    transfer: Transfer
    prefix: StoredPrefix
    blocks: list[_Block]
    num_bytes: int
    num_tokens: int
    """Tokens that are not computed if it restores all of its blocks."""
    after: Any
    """The `mark` of the memory after the last step that may write to the blocks."""
    loaded: list[_Block] = field(default_factory=list)
    """Of `blocks`, from the front, those that were read whole."""
    seconds: float = 0.0
    is_abandoned: bool = False


class _Keys(NamedTuple):
    """The keys of a store's entries, for one version of the weights."""

    version: int
    fingerprints: tuple[bytes, ...]
    state: tuple[bytes, int] | None


class KVOffloader(EnginePart):
    """Stores the KV of sequences, and restores it for requests that wait.

    `memory` has the blocks of the manager's pool; there is one fingerprint for each of its layer
    groups. For a model with states, `state` is the fingerprint of its snapshots and the blocks of
    each, which are the layer group after the others. Public methods but `close` are for the
    engine's thread.

    A prefix of a model with states is restored up to the last position at which a snapshot is
    stored; only keys and values before one are stored.
    """

    def __init__(
        self,
        store: KVStore,
        memory: BlockMemory,
        manager: BlockManager,
        fingerprints: Sequence[bytes],
        enqueue: Callable[[Callable[[], object]], object] = lambda _: None,
        *,
        state: tuple[bytes, int] | None = None,
    ) -> None:
        """`enqueue` has the engine's thread call something between two steps."""
        self._store, self._memory, self._manager = store, memory, manager
        self._keys = _Keys(manager.weights_version, tuple(fingerprints), state)
        self._windows = manager.groups
        self._bytes = [memory.block_bytes(group) for group in range(len(self._windows))]
        """Of a block of tokens, by layer group."""
        self._snapshot_bytes = 0
        if state is not None:
            self._snapshot_bytes = state[1] * memory.block_bytes(len(self._windows))
        self._enqueue = enqueue
        self._lookups: dict[SequenceState, _Lookup] = {}
        """Of unfinished sequences that have waited."""
        self._num_stored: dict[SequenceState, int] = {}
        """Tokens of unfinished sequences that were queued to be stored."""
        self._open: deque[_Load] = deque()
        """Loads that have not been finished, the oldest first."""
        self._behind: set[SequenceState] = set()
        """Sequences whose prefix is in another's load; looked up again when one has ended."""
        self._loads: SimpleQueue[_Load | None] = SimpleQueue()
        self._loaded: SimpleQueue[_Load] = SimpleQueue()
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        """Calls for the store thread."""
        self._used_again, self._new = _Backlog(), _Backlog()
        """Sequences that wait to be stored: those that began with cached tokens, and others."""
        self._last_stats = store.stats()
        self._last_flush: Flush | None = None
        self._next_check = 0.0
        self._last_progress = 0.0
        """When the load thread last moved something."""
        self._last_abandoned = 0.0
        self.are_steps_running = False
        """While they are, bytes move more slowly."""
        self._are_others_running = False
        """True if sequences ran already when loads were last looked for; else loads do not rest."""
        self._num_pins_before = 0
        """`num_pins` before the step was planned."""
        self.num_pins = 0
        """Pins that the store thread has taken and released so far."""
        self._load_rate, self._compute_rate = Rate(), Rate()
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._threads = [
            Thread(target=run, name=f"pyengine-kv-{name}", daemon=True)  # a disk may never answer
            for name, run in (("load", self._run_loads), ("store", self._run_stores))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_busy(self) -> bool:
        """True if blocks are held that come free without any step, as far as can be known."""
        if self.num_pins % 2 or any(not load.is_abandoned for load in self._open):
            return True
        return bool(self._open) and monotonic() < self._last_abandoned + _LAST_WAIT

    def frees_blocks(self) -> bool:
        """See `EnginePart.frees_blocks`: also if it has freed some since the step was planned."""
        return self.is_busy or self.num_pins != self._num_pins_before

    def is_ready_for_change(self) -> bool:
        """See `EnginePart.is_ready_for_change`: once loads have ended and no block is stored."""
        for load in self._open:
            load.is_abandoned = True  # the thread that loads ends it after a piece
        self.finish_loads()
        return not self._open and self.num_pins % 2 == 0

    def kv_dropped(self) -> None:
        """Look stored prefixes up again."""
        self._lookups.clear()
        self._behind.clear()

    def rekey(self, fingerprints: Sequence[bytes], of_state: bytes | None) -> None:
        """Load and store the KV of other weights from now on."""
        state = self._state
        if state is not None and of_state is not None:
            state = (of_state, state[1])
        self._keys = _Keys(self._manager.weights_version, tuple(fingerprints), state)

    @property
    def _state(self) -> tuple[bytes, int] | None:
        """The fingerprint of snapshots and the blocks of one; None: the model has no states."""
        return self._keys.state

    def before_plan(self, scheduler: Scheduler, previous: ScheduledStep | None) -> None:
        """Start loads for the first waiting sequences, and end late ones."""
        self.are_steps_running = previous is not None
        self._are_others_running = scheduler.num_running > 0
        self.finish_loads()
        now = monotonic()
        if now > self._next_check:
            self._next_check = now + _CHECK
            self._check_store()
        if self._open and now > self._last_progress + _PATIENCE:
            self._abandon()
        for sequence in islice(scheduler.waiting, _LOOKAHEAD):
            self.look_up(sequence)
        self._num_pins_before = self.num_pins

    def planned(self, step: ScheduledStep) -> None:
        """See `EnginePart.planned`."""
        self.are_steps_running = True

    def committed(self, submitted: SubmittedStep) -> None:
        """Measure how fast prompts are computed."""
        if submitted.num_tokens >= _MIN_TOKENS:
            seconds = monotonic() - submitted.step.planned_time
            self._compute_rate.add(submitted.num_tokens, seconds)

    def prompt_done(self, request: Request) -> Iterable[Request]:
        """Store a prompt; one without output is stored at its end."""
        if request.rules.max_output:
            self._store_sequence(request.sequences[0])
        return ()

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Store sequences that have ended, unless they have failed."""
        for sequence in sequences:
            if sequence.output.finish_reason != "error":
                self._store_sequence(sequence)
            self._lookups.pop(sequence, None)
            self._num_stored.pop(sequence, None)
            self._behind.discard(sequence)

    def idle(self) -> None:
        """Let bytes move at full speed."""
        self.are_steps_running = False

    def _abandon(self) -> None:
        """End all waits for a disk that does not answer. Blocks stay held until it does."""
        self._behind.clear()
        for load in self._open:
            if not load.is_abandoned:
                self._last_abandoned = monotonic()
                load.transfer.abandon()
                load.is_abandoned = True
                self.counters["abandoned_loads"] += 1

    def finish_loads(self) -> None:
        """Complete the transfers whose bytes have arrived."""
        with suppress(Empty):
            while True:
                self._finish(self._loaded.get_nowait())

    def _finish(self, load: _Load) -> None:
        self._open.remove(load)
        self._behind.clear()
        sequence, transfer, blocks = load.sequence, load.transfer, load.blocks
        num_tokens = 0 if load.is_abandoned else self._restored_tokens(load)
        if num_tokens == 0:
            transfer.fail()
        else:
            transfer.complete(load.loaded)
            sequence.request.progress.num_restored_tokens += num_tokens
            self.counters["restored_tokens"] += num_tokens
        if len(load.loaded) < len(blocks):  # what is not there now will not be there soon
            if sequence in self._lookups:
                self._lookups[sequence].is_done = True
            self.counters["failed_loads"] += 1
        else:
            self._load_rate.add(load.num_bytes, load.seconds)
        self.counters["load_seconds"] += load.seconds

    def _restored_tokens(self, load: _Load) -> int:
        """Tokens that are not computed if the loaded blocks are cached."""
        if self._state is None:
            return load.transfer.restored_tokens(load.loaded)
        return load.num_tokens if len(load.loaded) == len(load.blocks) else 0

    def look_up(self, sequence: SequenceState) -> bool:
        """Start to load the stored prefix of a waiting sequence, if it has one that is worth it.

        True if it is being loaded: the sequence is not to be admitted before.
        """
        lookup = self._lookups.get(sequence)
        num_preemptions = sequence.request.progress.num_preemptions
        if lookup is None or lookup.num_preemptions != num_preemptions:
            lookup = self._lookups[sequence] = _Lookup(num_preemptions)
        if lookup.is_done:
            return False
        if any(load.sequence is sequence and not load.is_abandoned for load in self._open):
            return True
        if sequence not in self._behind and not any(load.is_abandoned for load in self._open):
            return self._begin_load(sequence, lookup)
        return False

    def _begin_load(self, sequence: SequenceState, lookup: _Lookup) -> bool:
        request, size = sequence.request, self._manager.block_size
        if not request.read_cache or request.is_internal:  # it is to be computed
            lookup.is_done = True
            return False
        tokens = sequence.kv.tokens() if sequence.token_ids else request.prompt_token_ids
        if lookup.prefix is None:
            lookup.prefix = self._prefix(tokens, request.space)
        prefix = lookup.prefix
        with self._manager.match_prefix(tokens, **request.space) as pin:
            first, reused = pin.num_tokens // size, pin.num_tokens
            if self._state is not None:
                reused = pin.num_state_tokens
        end, num_bytes = self._restorable(prefix, first, (len(tokens) - 1) // size)
        num_tokens = end * size - reused
        if num_tokens <= 0 or not self._pays(num_tokens, num_bytes):
            lookup.is_done = True
            return False
        kv = self._manager.sequence(tokens, **request.space)
        transfer = kv.reserve(end * size)
        kv.free()
        if isinstance(transfer, Loading):
            self._behind.add(sequence)
            return False
        if isinstance(transfer, NoRoom):
            return False  # it is looked up again
        if transfer is None:
            lookup.is_done = True
            return False
        blocks = transfer.blocks
        if not self._open:
            self._last_progress = monotonic()
        mark = self._memory.mark()
        load = _Load(sequence, transfer, prefix, blocks, num_bytes, num_tokens, mark)
        self._open.append(load)
        self.counters["loads"] += 1
        self._loads.put(load)
        return True

    def _restorable(self, prefix: StoredPrefix, first: int, last: int) -> tuple[int, int]:
        """How many blocks of a prefix can be restored, and the bytes to load.

        Blocks before `first` are cached. A state is of use before the end of block `last` only.
        """
        most = int(_LOADING_SHARE * self._manager.usage().available)
        if self._state is None:
            end = first + prefix.stored_blocks(first, most=most // len(self._windows))
        else:
            fitting = max(0, most - self._state[1]) // len(self._windows)
            end = prefix.last_snapshot(first, min(last, first + fitting))
        counts = prefix.needed_blocks(min(first, end), end)
        num_bytes = sum([own * count for own, count in zip(self._bytes, counts, strict=True)])
        return end, num_bytes + self._snapshot_bytes

    def _prefix(
        self, tokens: "Sequence[int]", space: BlockSpace, keys: "_Keys | None" = None
    ) -> StoredPrefix:
        keys = keys or self._keys
        return self._store.prefix(
            tokens,
            self._manager.block_size,
            fingerprints=keys.fingerprints,
            **space,
            windows=self._windows,
            state=keys.state,
        )

    def is_stored_by_another_model(self, tokens: "Sequence[int]", space: BlockSpace) -> bool:
        """True if the store has the first block of these tokens under another fingerprint.

        Another model has computed it then, another version of its weights, or other settings.
        """
        size = self._manager.block_size
        with suppress(StoreError):  # it is closed
            stored = {fingerprint for fingerprint, *_ in self._store.fingerprints()}
            others = stored.difference(self._keys.fingerprints, (self._state or ())[:1])
            for other in islice(sorted(others), _MAX_OTHER_MODELS):
                prefix = self._store.prefix(tokens, size, fingerprints=[other], **space)
                if prefix.contains(0):
                    return True
        return False

    def _pays(self, num_tokens: int, num_bytes: int) -> bool:
        """True if loading takes clearly less time than computing, or if either is unknown."""
        compute, seconds = self._compute_rate.value, self._load_seconds(num_bytes)
        return compute is None or seconds is None or seconds <= _GAIN * num_tokens / compute

    def _load_seconds(self, num_bytes: int) -> float | None:
        """Seconds until a load of this many bytes would end, after the queued ones."""
        before = sum([load.num_bytes for load in self._open if not load.is_abandoned])
        rate = self._load_rate.value
        return None if rate is None else (before + num_bytes) / rate

    @property
    def restore_cost(self) -> float:
        """The time to restore a token relative to computing one, by the last rates; at most 1.

        1 until both rates were measured.
        """
        load, compute = self._load_rate.last, self._compute_rate.last
        if load is None or compute is None:
            return 1.0
        return min(1.0, sum(self._bytes) / self._manager.block_size * compute / load)

    def _store_sequence(self, sequence: SequenceState) -> None:
        """Have the computed blocks of a sequence stored, unless they are few and new."""
        kv: KVSequence | None = getattr(sequence, "kv", None)  # a sample before its fork has none
        if (
            kv is None
            or not kv.is_live
            or not self._store.is_writer
            or sequence.request.is_internal
        ):
            return
        size, request = self._manager.block_size, sequence.request
        num_tokens = kv.num_computed_tokens
        if (num_kept := sequence.num_kept) is not None:
            num_tokens = min(num_tokens, num_kept)
        num_tokens = num_tokens // size * size
        if num_tokens < (size if request.progress.num_cached_tokens else max(size, _SHORT)):
            return
        num_stored = self._num_stored.get(sequence, 0)
        if num_tokens <= num_stored:  # the prompt was, and no block has become full since
            return
        if self._used_again.num_tokens + self._new.num_tokens >= _MAX_QUEUED_TOKENS:
            self.counters["dropped_stores"] += 1
            return
        self._num_stored[sequence] = num_tokens
        backlog = self._used_again if request.progress.num_cached_tokens else self._new
        backlog.add(num_tokens)
        tokens = kv.tokens()[:num_tokens]
        self._work.put(partial(self._store_prefix, tokens, request.space, backlog))

    def _run_loads(self) -> None:
        while (load := self._loads.get()) is not None:
            start = monotonic()
            try:
                while len(load.loaded) < len(load.blocks) and not load.is_abandoned:
                    piece = self._piece(load.blocks, len(load.loaded))
                    with self._resting(_LOAD_REST if self._are_others_running else 0.0):
                        moved = self._memory.load(load.prefix, piece, load.after)
                    load.loaded += moved
                    self._last_progress = monotonic()
                    if len(moved) < len(piece):
                        break
            except StoreError as error:
                _log.warning("KV store: a load failed, the KV is computed instead: %s", error)
            load.seconds = monotonic() - start
            self._loaded.put(load)
            self._enqueue(self.finish_loads)

    def _piece(self, blocks: list[_Block], done: int) -> list[_Block]:
        """The next blocks to move."""
        most = max(1, self._memory.piece_bytes // max(self._bytes))
        return blocks[done : end_of_piece(blocks, done, most)]

    @contextmanager
    def _resting(self, rest: float) -> Iterator[None]:
        """While steps run, rest after a piece, so that they keep the processors.

        Short pieces instead of a low priority: a thread of low priority that is stopped while it
        holds the interpreter's lock stops the steps too.
        """
        start = thread_time()
        yield
        if self.are_steps_running and self._memory.shares_processors:
            sleep(rest * (thread_time() - start))

    def _run_stores(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except (StoreError, OSError) as error:
                _log.warning("KV store: %s", error)

    def _store_prefix(self, tokens: list[int], space: BlockSpace, backlog: _Backlog) -> None:
        """Store the cached blocks of a prefix that the store lacks."""
        self.num_pins += 1
        try:
            keys = self._keys
            prefix = self._prefix(tokens, space, keys)
            ends = [len(tokens)]
            if self._state is not None:
                ends = self._manager.snapshot_positions(tokens, **space)
            for end in ends:
                with self._manager.match_prefix(tokens[:end], **space) as pin:
                    if self._manager.weights_version != keys.version:  # it has other blocks
                        return
                    if self._state is None or pin.num_state_tokens == end:
                        self._put(prefix, prefix.missing(pin.indexed_blocks))
        finally:
            backlog.remove(len(tokens))
            self.num_pins += 1
            self._enqueue(self.finish_loads)

    def _put(self, prefix: StoredPrefix, blocks: list[_Block]) -> None:
        """Store blocks, and wait for space in the queue meanwhile."""
        done, deadline, was_empty = 0, monotonic() + _PATIENCE, False
        while done < len(blocks):
            rest = _STORE_REST if self._used_again.num_tokens else _NEW_STORE_REST
            with self._resting(rest):
                stored = len(self._memory.store(prefix, self._piece(blocks, done)))
            done += stored
            if stored:
                deadline, was_empty = monotonic() + _PATIENCE, False
                continue
            stats = self._store.stats()
            if was_empty or stats["is_suspended"] or monotonic() > deadline:
                return
            was_empty = stats["queued_bytes"] == 0
            sleep(0.005)

    def describe(self) -> dict[str, object]:
        """The store's entries, its limit, and whether this process writes to it."""
        stats = self._store.stats()
        return {
            "kv_cache_store_bytes": stats["limit_bytes"],
            "kv_cache_entries": stats["readable_entries"],
            "kv_cache_access": "write" if self._store.is_writer else "read: another process writes",
        }

    def _check_store(self) -> None:
        """Log the store's notices; a reader follows the writer."""
        self._log_notices()
        if not self._store.is_writer and self._work.empty():
            self._work.put(self._store.refresh)

    def _log_notices(self) -> None:
        for notice in self._store.take_notices():
            _log.warning("%s", notice)

    def stats(self) -> dict[str, float]:
        """`COUNTERS` and `STORE_COUNTERS`, each by its name, and `restore_cost`."""
        with suppress(StoreError):  # it is closed: what it was at last
            self._last_stats = self._store.stats()
        of_store = {name: self._last_stats[name] for name in STORE_COUNTERS}
        return {**self.counters, **of_store, "restore_cost": self.restore_cost}

    def engine_stats(self) -> dict[str, object]:
        """See `EnginePart.engine_stats`."""
        return {"store": self.stats()}

    def begin_flush(self) -> Flush:
        """Begin to wait until the current queue is written. Thread-safe."""
        self._last_flush = flush = Flush(self._store, lambda: self.num_pins)
        self._work.put(flush.is_copied.set)
        return flush

    def flush(self, timeout: float) -> bool:
        """Write the queue. False after `timeout` seconds, or if the disk writes nothing.

        Any thread may call it. For a disk that writes nothing see `Flush.poll`.
        """
        flush, end = self.begin_flush(), monotonic() + timeout
        while (is_written := flush.poll()) is None and monotonic() <= end:
            sleep(max(0.0, min(0.01, end - monotonic())))
        return bool(is_written)

    def close(self, timeout: float) -> bool:
        """Write the queue. False if that takes longer than `timeout` seconds.

        After a flush during which the disk wrote nothing, it is not waited for once more.
        """
        if self._last_flush is not None and self._last_flush.has_failed:
            timeout = 0.0
        deadline = monotonic() + timeout
        self.are_steps_running = False
        self._loads.put(None)
        self._work.put(None)
        self._threads[1].join(timeout)
        self.stats()
        with suppress(StoreError):  # it is closed
            self._store.flush(max(0.0, deadline - monotonic()))
            self._log_notices()
        return self._store.close(max(0.0, deadline - monotonic()))


COUNTERS = {
    "loads": "Loads that were started.",
    "failed_loads": "Loads of which some entry could not be read.",
    "abandoned_loads": "Loads abandoned because the disk did not answer; computed instead.",
    "load_seconds": "Seconds that loads took.",
    "restored_tokens": "Prompt tokens that were restored from the store.",
    "dropped_stores": "Sequences that were not stored because too many tokens waited to be.",
}
"""Descriptions of the counters of an offloader."""

STORE_COUNTERS = {
    "stored": "Entries written.",
    "stored_bytes": "Bytes written, without headers.",
    "known": "Entries that were to be stored and were there.",
    "dropped_queue_full": "Entries not stored because too many waited to be written.",
    "dropped_failed": "Entries not stored because the disk failed or did not answer.",
    "hits": "Entries read.",
    "hit_bytes": "Bytes read, without headers.",
    "misses": "Entries that were to be read and were not there.",
    "failed": "Entries that could not be read because the disk failed or did not answer.",
    "damaged": "Entries dropped because their bytes were not what had been written.",
    "evicted": "Entries evicted because the store was full.",
    "write_errors": "Write operations that failed.",
    "read_errors": "Read operations that failed.",
    "stalls": "Times that the disk did not answer.",
}
"""Descriptions of the counters of a store since it was opened."""
