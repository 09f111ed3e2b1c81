"""Builds an engine from settings: load, size, choose and connect, in this order.

settings -> model -> attention backend -> KV pool and its manager -> runner -> engine
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pyengine.attention.backend import AttentionBackend
from pyengine.attention.choice import Choice, select_backend
from pyengine.attention.needs import AttentionNeeds, needs_of
from pyengine.config import EngineSettings, store_key
from pyengine.cpu.threads import ComputeThreads, compute_threads
from pyengine.engine.adapters import AdapterRegistry, AdapterSlots
from pyengine.engine.core import Engine
from pyengine.engine.description import Setup, describe, rows_have_same_bits
from pyengine.engine.drafting import Drafting
from pyengine.engine.explain import Explainer
from pyengine.engine.input_processor import InputProcessor
from pyengine.engine.loop import Inbox
from pyengine.engine.model_limits import compute_model_limits
from pyengine.engine.offloading import KVOffloader
from pyengine.engine.parts import EnginePart, MemoryAhead
from pyengine.engine.pinning import Pinning
from pyengine.engine.verification import HitVerifier, KeptRecording
from pyengine.engine.weights import WeightChanges
from pyengine.errors import ConfigurationError
from pyengine.executor.executor import Executor
from pyengine.executor.input_buffers import RunnerLimits
from pyengine.executor.kv_cache_config import KVCacheConfig, cache_specs, configure_cache
from pyengine.executor.memory_profile import (
    CudaMeter,
    activation_bytes,
    check_step_fits,
    graph_bytes,
)
from pyengine.executor.model_runner import ModelRunner, Runner
from pyengine.kv_cache import BlockManager, ConfigError, KVStore, StoreError, kv_fingerprint
from pyengine.kv_cache.layer_groups import LayerGroups
from pyengine.kv_cache.memory import available_memory, keep_freed_memory
from pyengine.kv_cache.pool import KVPool, resolve_kv_cache_dtype, tensor_specs
from pyengine.kv_cache.pool_size import PoolSettings
from pyengine.models.adapters import AdapterLimits
from pyengine.models.loaded import LoadedModel
from pyengine.models.loader import load_model, model_properties
from pyengine.models.placement import resolve_device
from pyengine.models.source import ModelSource, resolve_source
from pyengine.request.prompt_entries import PromptEntryCache
from pyengine.request.request import SequenceState
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.pins import PinTable
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from pyengine.scheduler.states import RunningStates
from pyengine.speculation.draft_model import DraftModel, LoadedDraft, kernel_settings, load_draft
from pyengine.speculation.drafters import Drafter, NgramDrafter, SuffixDrafter
from pyengine.speculation.measured_costs import measured_costs
from pyengine.speculation.mtp import MTPDrafter
from pyengine.speculation.policy import DraftPolicy
from pyengine.utils.devices import CPU, Device
from pyengine.utils.dtypes import DType
from pyengine.utils.openmp import torch_threads
from pyengine.utils.packaging import require_torch

if TYPE_CHECKING:
    from pyengine.executor.cuda_graphs import CudaGraphRecorder
    from pyengine.executor.tensor_parallel.distributed import WorkerGroup

_log = logging.getLogger(__name__)

_SOME_BLOCK_SIZE = 16  # for checks of settings, before the backend has chosen a block size
_DISK_BYTES = 20 << 30  # the size of a store, if nothing sets it
_MIN_DISK_BYTES = 64 << 20  # four segments of a store
_CLOSE_SECONDS = 5
"""For a store to close, if the engine cannot be built. Nothing is queued then."""
_QUEUE_BYTES = 256 << 20  # of a store in memory, at most, for blocks that wait to be written
_STORED_LAYOUT = b"1: keys of the layers of a group, then values, [block_size, kv_heads, head_dim]"
"""Changes with everything that would make stored KV wrong and is no property of the model."""
_KV_TOLERANCE = 0.05
"""Relative difference of the KV of equal tokens in other batches: rounding makes a tenth of it in
bfloat16, another token several times as much."""
_DRAFTS = 7  # the most drafts for a sequence and step, unless the model's MTP layers set the number


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine and its parts. `worker_group` are the processes of a divided model.

    `default_params` are for requests without sampling parameters.
    """

    loaded: LoadedModel
    manager: BlockManager
    engine: Engine
    input_processor: InputProcessor
    pins: PinTable
    offloader: KVOffloader | None
    verifier: HitVerifier | None
    weights: WeightChanges
    adapters: AdapterRegistry | None
    inbox: Inbox
    worker_group: "WorkerGroup | None"
    threads: ComputeThreads
    default_params: SamplingParams
    description: dict[str, object]


def build_engine(settings: EngineSettings, *, populate: bool = False) -> BuiltEngine:
    """Build an engine. Raises as `LLM` does, and then leaves no process running.

    With `populate` the memory of the KV pool is allocated at once, in the background, and not when
    a step first writes to it.
    """
    _check(settings)
    threads = compute_threads(settings.num_threads, settings.tensor_parallel_size)
    with torch_threads(threads.count), ExitStack() as undo:
        store = _open_store(settings)  # what is wrong with it is known before the model is loaded
        if store is not None:
            undo.callback(store.close, _CLOSE_SECONDS)
        worker_group = _worker_group(settings, threads)
        with worker_group or nullcontext():  # the workers end if this fails
            setup = _set_up(settings, worker_group, threads)
            built = _connect(setup, worker_group, threads, store, populate=populate)
        undo.pop_all()
    return built


def _worker_group(settings: EngineSettings, threads: ComputeThreads) -> "WorkerGroup | None":
    if settings.tensor_parallel_size == 1:
        return None
    require_torch(f"tensor_parallel_size={settings.tensor_parallel_size}")
    from pyengine.executor.tensor_parallel.distributed import WorkerGroup

    return WorkerGroup(
        _source(settings),
        device=settings.device,
        dtype=settings.dtype,
        size=settings.tensor_parallel_size,
        num_threads=threads.count,
    )


def _check(settings: EngineSettings) -> None:
    """Refuse settings that the block manager or torch reject, before loading."""
    asked = settings.requested_block_size
    size = _SOME_BLOCK_SIZE if asked is None else asked
    resolve_kv_cache_dtype(settings.kv_cache_dtype, "float32")
    try:
        BlockManager(1, size, eviction=settings.eviction)
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error


def _set_up(
    settings: EngineSettings, worker_group: "WorkerGroup | None", threads: ComputeThreads
) -> Setup:
    """Load the model, choose the attention backend, and size the KV pool."""
    loaded = worker_group.loaded if worker_group else _load(settings, threads.count)
    if loaded.states:
        _refuse_with_states(settings, loaded.name)
    draft = load_draft(settings, loaded, threads.count)  # before the free memory is measured
    needs = needs_of(
        loaded.layers,
        loaded.device,
        loaded.dtype,
        kv_dtype=resolve_kv_cache_dtype(settings.kv_cache_dtype, loaded.dtype),
        block_size=settings.requested_block_size,
    )
    choice = select_backend(settings.attention_backend, needs)
    pool = _pool_settings(settings, choice, needs, loaded, worker_group)
    if draft is not None:
        pool = replace(pool, bytes_beside=draft.bytes_per_token * pool.block_size)
    max_tokens = settings.max_num_batched_tokens
    cache = configure_cache(
        loaded, pool, max_tokens, layer_groups=settings.layer_groups, kv_dtype=needs.cache_dtype
    )
    if loaded.states and cache.size.num_states < settings.max_num_seqs:
        pool, settings = _with_fewer_seqs(pool, settings, cache.size.num_states)
    manager = cache.manager(
        prefix_caching=settings.enable_prefix_caching,
        in_flight_sharing=settings.in_flight_sharing,
        partial_reuse=settings.partial_reuse,
        explain=settings.explain_misses,
        eviction=settings.eviction,
        events=settings.event_hash_seed is not None,
        hash_seed=settings.event_hash_seed,
    )
    model_limits = compute_model_limits(loaded, pool, manager, max_tokens, settings.max_model_len)
    longest, num_mtp_layers = model_limits.max_model_len, loaded.num_mtp_layers
    return Setup(
        settings=settings,
        loaded=loaded,
        draft=draft,
        needs=needs,
        choice=choice,
        cache=cache,
        manager=manager,
        model_limits=model_limits,
        runner_limits=_runner_limits(
            settings, longest, cache.block_size, cache.groups, num_mtp_layers, bool(loaded.states)
        ),
    )


def _refuse_with_states(settings: EngineSettings, name: str) -> None:
    """Refuse settings that cannot be used with recurrent layers."""
    if settings.speculation is not None:
        raise ConfigurationError(
            f"speculation={settings.speculation!r}: {name} has layers that keep a state, which "
            "rejected drafts would have changed; leave speculation out"
        )
    if settings.compile:
        raise ConfigurationError(
            f"compile=True: {name} has layers that keep a state, which torch does not compile "
            "here; leave compile out"
        )


def _with_fewer_seqs(
    pool: PoolSettings, settings: EngineSettings, num_states: int
) -> tuple[PoolSettings, EngineSettings]:
    """The same settings for as many sequences as there are states."""
    _log.info(
        "max_num_seqs is %d, not %d: states of running sequences take half of the KV pool's "
        "memory; give a larger kv_cache_memory for more",
        num_states,
        settings.max_num_seqs,
    )
    return replace(pool, max_num_seqs=num_states), replace(settings, max_num_seqs=num_states)


def _connect(
    setup: Setup,
    worker_group: "WorkerGroup | None",
    threads: ComputeThreads,
    store: KVStore | None,
    *,
    populate: bool,
) -> BuiltEngine:
    """Connect manager, scheduler, executor and parts."""
    settings, loaded, manager = setup.settings, setup.loaded, setup.manager
    runner = _main_runner(setup, worker_group)
    threads = _step_threads(setup, threads, worker_group)
    executor = _executor(settings, runner, loaded.device, threads)
    kept = PromptEntryCache(manager.num_blocks, manager.block_size)
    processor = InputProcessor(
        setup.model_limits, kept, tokenizer=loaded.tokenizer, seed=settings.seed
    )
    inbox: Inbox = SimpleQueue()
    pool = runner.pool if isinstance(runner, ModelRunner) else None
    offloader = verifier = None
    if store is not None:
        assert pool is not None  # settings refuse a divided model
        offloader = _offloader(setup, store, pool, inbox, populate=populate)
    if settings.verify_cache_hits:
        assert pool is not None  # settings refuse a divided model
        verifier = _verifier(setup, processor, pool)
    slots = AdapterSlots(settings.max_loras) if settings.enable_lora else None
    scheduler = _scheduler(setup, offloader, slots)
    pinning = Pinning(manager, scheduler.pins)
    parts: list[EnginePart | None] = [
        slots,
        Explainer(manager.block_size) if settings.explain_misses else None,
        pinning,
        verifier,
        offloader,
        _drafting(setup, scheduler, executor),
    ]
    if pool is not None and populate:
        pool.populate_in_background()
    elif pool is not None:
        largest = settings.max_num_batched_tokens
        parts.append(MemoryAhead(manager, pool.populate_piece, largest))
    present = [part for part in parts if part is not None]
    params = default_params(settings, loaded)
    engine = Engine(manager, scheduler, executor, present, slots)
    return BuiltEngine(
        loaded=loaded,
        manager=manager,
        engine=engine,
        weights=WeightChanges(
            engine,
            loaded,
            manager,
            processor,
            pool=pool,
            rekey=None if offloader is None else partial(_rekey, setup, offloader),
            refusal=_no_sleep(setup),
        ),
        adapters=_registry(setup),
        input_processor=processor,
        pins=scheduler.pins,
        offloader=offloader,
        verifier=verifier,
        inbox=inbox,
        worker_group=worker_group,
        threads=threads,
        default_params=params,
        description=describe(setup, executor, threads, offloader, params),
    )


def _rekey(setup: Setup, offloader: KVOffloader, properties: Sequence[tuple[str, bytes]]) -> None:
    """Have the KV of weights with these properties stored."""
    offloader.rekey(*_fingerprints(setup, properties))


def _no_sleep(setup: Setup) -> str:
    """Why the engine cannot sleep; empty: it can."""
    if setup.loaded.device.type != "cpu":
        return (
            "sleep: on a device, graphs hold the addresses of weights and pool; only an engine "
            "on the CPU can sleep"
        )
    if setup.settings.compile or not setup.loaded.model.takes_arrays:
        return "sleep: a model that torch computes keeps its weights; leave compile and dtype out"
    return ""


def _main_runner(setup: Setup, worker_group: "WorkerGroup | None") -> Runner:
    settings, cache, limits = setup.settings, setup.cache, setup.runner_limits
    if worker_group is None:
        return _runner(settings, setup.loaded, setup.choice, cache, limits)
    from pyengine.executor.tensor_parallel.ranks import RunnerSetup

    graphs = _wants_graphs(settings, setup.loaded)
    return worker_group.runner(RunnerSetup(cache, setup.choice, limits, graphs))


def _step_threads(
    setup: Setup, threads: ComputeThreads, worker_group: "WorkerGroup | None"
) -> ComputeThreads:
    """The threads of steps: they adapt to other load if a step has the same bits with any number.

    MKL's products and torch's attention depend on it.
    """
    loaded, draft, on_cpu = setup.loaded, setup.draft, setup.choice.backend == "cpu"
    models = [loaded] if draft is None else [loaded, draft.loaded]
    can_adapt = worker_group is None and on_cpu and not loaded.has_torch_products
    return replace(
        threads,
        adapts=threads.adapts and can_adapt,
        torch_is_alone=on_cpu and not any(model.torch_computes for model in models),
    )


def _registry(setup: Setup) -> AdapterRegistry | None:
    tables = setup.loaded.adapters
    return None if tables is None else AdapterRegistry(tables, setup.settings.max_cpu_loras)


def _scheduler(
    setup: Setup, offloader: KVOffloader | None, slots: AdapterSlots | None
) -> Scheduler:
    settings, manager = setup.settings, setup.manager
    checks = [part for part in (slots and slots.is_held, offloader and offloader.look_up) if part]

    def is_held(sequence: SequenceState) -> bool:
        return any(check(sequence) for check in checks)

    return Scheduler(
        manager,
        SchedulerLimits(
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_num_seqs_per_tenant=settings.max_num_seqs_per_tenant,
            max_overtakes=settings.max_overtakes,
            max_pinned_blocks=_max_pinned_blocks(
                settings, manager, setup.model_limits.max_model_len
            ),
        ),
        replay=setup.loaded.num_mtp_layers,
        prefix_caching=settings.enable_prefix_caching,
        is_held=is_held if checks else None,
        states=RunningStates(settings.max_num_seqs) if setup.loaded.states else None,
    )


def _offloader(
    setup: Setup, store: KVStore, pool: KVPool, inbox: Inbox, *, populate: bool
) -> KVOffloader:
    cache = setup.cache
    fingerprints, of_state = _fingerprints(setup, setup.loaded.properties)
    state = None if of_state is None else (of_state, cache.snapshot_blocks)
    if not populate and (entries := store.stats()["readable_entries"]):
        pool.populate(entries // len(fingerprints))  # for what is to be restored
    memory, manager = pool.block_memory(), setup.manager
    return KVOffloader(store, memory, manager, fingerprints, inbox.put, state=state)


def _verifier(setup: Setup, processor: InputProcessor, pool: KVPool) -> HitVerifier:
    kept = None
    try:
        kept = KeptRecording(setup.manager)
    except OSError as error:
        _log.warning("verify_cache_hits records no blocks: %s", error)
    is_exact = rows_have_same_bits(setup.settings, setup.loaded, setup.choice)
    return HitVerifier(
        setup.manager,
        processor.request,
        pool.differences,
        share=setup.settings.verify_cache_hits,
        tolerance=0.0 if is_exact else _KV_TOLERANCE,
        kept=kept,
    )


def _drafting(setup: Setup, scheduler: Scheduler, executor: Executor) -> Drafting | None:
    if setup.settings.speculation is None:
        return None
    limits = setup.runner_limits
    costs = measured_costs(executor.runner, setup.cache.manager(), limits)
    return Drafting(
        scheduler,
        _drafter(setup, executor),
        DraftPolicy(costs),
        max_tokens=limits.rows_per_seq - 1,
        vocab_size=setup.model_limits.vocab_size,
    )


def _open_store(settings: EngineSettings) -> KVStore | None:
    """The store of the settings, if any. Raises `ConfigurationError` if it cannot be had."""
    if settings.kv_cache_host_memory is not None:
        return _host_store(settings.kv_cache_host_memory, resolve_device(settings.device))
    if settings.kv_cache_dir is None:
        return None
    num_bytes = settings.kv_cache_disk or _DISK_BYTES
    if num_bytes < _MIN_DISK_BYTES:
        raise ConfigurationError(
            f"kv_cache_disk={num_bytes}: a folder needs at least {_MIN_DISK_BYTES} bytes (64 MiB)"
        )
    try:
        return KVStore(
            settings.kv_cache_dir,
            max_bytes=num_bytes,
            access=settings.kv_cache_access,
            auth_key=store_key(),
        )
    except StoreError as error:
        raise ConfigurationError(f"kv_cache_dir: {error}") from error


def _host_store(num_bytes: int, device: Device) -> KVStore:
    """A store in the host's memory, for an engine on a device."""
    asked = f"kv_cache_host_memory={num_bytes}"
    if device.type == "cpu":
        raise ConfigurationError(
            f"{asked} is for GPUs: on the CPU the KV pool is in the host's memory, and a larger "
            "kv_cache_memory takes the place of both"
        )
    available = available_memory(CPU)
    if num_bytes > available:
        raise ConfigurationError(f"{asked}: {available} bytes of the host's memory are available")
    queue = min(_QUEUE_BYTES, num_bytes // 8)
    try:
        return KVStore.in_memory(num_bytes - queue, queue_bytes=queue)
    except StoreError as error:
        raise ConfigurationError(f"{asked}: {error}") from error


def _fingerprints(
    setup: Setup, of_model: Sequence[tuple[str, bytes]]
) -> tuple[list[bytes], bytes | None]:
    """The fingerprint of each layer group, and of snapshots if the model has states.

    Entries are those of the model with these properties alone.
    """
    settings, loaded, needs, cache = setup.settings, setup.loaded, setup.needs, setup.cache
    properties = [
        ("layout", _STORED_LAYOUT),
        ("block size", str(cache.block_size).encode()),
        ("device", loaded.device.type.encode()),
        ("dtypes", f"{loaded.dtype} {needs.cache_dtype}".encode()),
        ("quantization", str(settings.quantization).encode()),
        *_scale_properties(cache),
        # The first product of an MLP is rounded before its activation then.
        *([("adapters", b"")] if loaded.adapters is not None else []),
        ("MTP layers", str(loaded.num_mtp_layers).encode()),
        *of_model,
    ]
    of_groups = [
        kv_fingerprint([("layers", _layers_of(cache.groups, group)), *properties])
        for group in range(len(cache.groups.windows))
    ]
    if not cache.states:
        return of_groups, None
    # Its bytes are cut into the blocks of all tensors of the pool.
    shapes = tensor_specs(cache.specs, cache.groups)
    layout = f"{list(cache.states)} {shapes} {cache.snapshot_blocks}".encode()
    return of_groups, kv_fingerprint([("states", layout), *properties])


def _scale_properties(cache: KVCacheConfig) -> list[tuple[str, bytes]]:
    scales = {
        layer: (spec.scale_k, spec.scale_v)
        for layer, spec in enumerate(cache.specs)
        if spec != spec.unscaled
    }
    return [("KV scales", str(scales).encode())] if scales else []


def _layers_of(groups: LayerGroups, group: int) -> bytes:
    """The layers of a group, its window, and their places in a block where tensors have parts."""
    places = {
        layer: (location.index, location.parts, location.part)
        for layer, location in enumerate(groups.locations)
        if location.group == group
    }
    parts = f" {list(places.values())}" if groups.has_parts else ""
    return f"{list(places)} {groups.windows[group]}{parts}".encode()


def default_params(settings: EngineSettings, loaded: LoadedModel) -> SamplingParams:
    """Parameters of requests without any: those of the model, or our defaults."""
    of_model: Mapping[str, Any] = loaded.default_sampling
    return SamplingParams(**of_model if settings.takes_model_sampling else {})


def _pool_settings(
    settings: EngineSettings,
    choice: Choice,
    needs: AttentionNeeds,
    loaded: LoadedModel,
    worker_group: "WorkerGroup | None",
) -> PoolSettings:
    """The settings of the pool, with its memory limit; the largest step must fit, too."""
    pool = PoolSettings(
        block_size=choice.block_size,
        num_blocks=settings.num_blocks,
        kv_cache_memory=settings.kv_cache_memory,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=min(settings.max_model_len or loaded.max_model_len, loaded.max_model_len),
        available_memory=worker_group.available_memory
        if worker_group
        else available_memory(loaded.device),
    )
    groups = LayerGroups.single(1)
    smallest_limits = _runner_limits(
        settings, pool.max_model_len, pool.block_size, groups, loaded.num_mtp_layers
    )
    check_step_fits(smallest_limits, pool, loaded)
    if _is_to_be_profiled(settings, loaded):
        memory = _memory_left(settings, pool, choice, needs.cache_dtype, loaded)
        return replace(pool, available_memory=memory)
    return pool


def _source(settings: EngineSettings) -> ModelSource:
    return resolve_source(
        settings.model,
        revision=settings.revision,
        token=settings.token,
        load_format=settings.load_format,
    )


def _load(settings: EngineSettings, num_threads: int) -> LoadedModel:
    source = _source(settings)
    adapters = None
    if settings.enable_lora:
        adapters = AdapterLimits(settings.max_loras, settings.max_lora_rank)
    is_mtp = settings.speculation == "mtp"
    kernels = kernel_settings(settings, with_mtp_layers=is_mtp, adapters=adapters)
    loaded = load_model(
        source,
        device=settings.device,
        dtype=settings.dtype,
        kernels=kernels,
        num_threads=num_threads,
    )
    if settings.kv_cache_dir is None:
        return loaded
    return replace(loaded, properties=tuple(model_properties(source, loaded)))


def _is_to_be_profiled(settings: EngineSettings, loaded: LoadedModel) -> bool:
    """True if the size of the pool depends on the memory that a step leaves on a device."""
    is_requested = settings.num_blocks is not None or settings.kv_cache_memory is not None
    return loaded.device.type == "cuda" and settings.tensor_parallel_size == 1 and not is_requested


def _memory_left(
    settings: EngineSettings,
    pool: PoolSettings,
    choice: Choice,
    kv_dtype: DType,
    loaded: LoadedModel,
) -> int:
    """Bytes that the largest step and the graphs leave on the device, with a pool of one block."""
    specs = cache_specs(loaded, kv_dtype)
    smallest = KVPool(specs, 1, pool.block_size, loaded.device)
    longest, groups = pool.max_model_len, smallest.groups
    limits = _runner_limits(settings, longest, pool.block_size, groups, loaded.num_mtp_layers)
    backend = choice.build(smallest)
    recorder = _recorder(settings, loaded, backend)
    runner = ModelRunner(loaded, smallest, backend, limits, record=recorder)
    left = available_memory(loaded.device)  # before the graphs, which `taken` has
    meter = CudaMeter(loaded.device)
    taken = activation_bytes(runner, limits, smallest.num_blocks, loaded.vocab_size, meter)
    taken += graph_bytes(runner, meter, None if recorder is None else recorder.pieces)
    return max(0, left - taken)


def _max_pinned_blocks(settings: EngineSettings, manager: BlockManager, max_model_len: int) -> int:
    """The most blocks that callers may pin: the longest request always fits beside them."""
    longest = manager.blocks_for(max_model_len, settings.max_num_batched_tokens)
    share = int(settings.max_pinned_share * manager.num_blocks)
    return max(0, min(share, manager.num_blocks - longest))


def _runner_limits(
    settings: EngineSettings,
    longest: int,
    block_size: int,
    groups: LayerGroups,
    num_mtp_layers: int,
    has_states: bool = False,
) -> RunnerLimits:
    drafts = settings.num_speculative_tokens or num_mtp_layers or _DRAFTS
    return RunnerLimits(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_blocks_per_seq=-(-longest // block_size),
        num_groups=len(groups.windows),
        rows_per_seq=1 if settings.speculation is None else 1 + drafts,
        has_states=has_states,
        has_adapters=settings.enable_lora,
    )


def _recorder(
    settings: EngineSettings, loaded: LoadedModel, backend: AttentionBackend
) -> "CudaGraphRecorder | None":
    """The recorder of CUDA graphs; None: steps run eagerly."""
    if not (_wants_graphs(settings, loaded) and backend.supports_graphs):
        return None
    from pyengine.executor.cuda_graphs import CudaGraphRecorder

    return CudaGraphRecorder()


def _wants_graphs(settings: EngineSettings, loaded: LoadedModel) -> bool:
    on_cuda = loaded.device.type == "cuda"
    return on_cuda and not loaded.num_mtp_layers and not settings.enforce_eager


def _runner(
    settings: EngineSettings,
    loaded: LoadedModel,
    choice: Choice,
    cache: KVCacheConfig,
    limits: RunnerLimits,
) -> ModelRunner:
    """A runner in this process, compiled and captured as the settings say."""
    pool = cache.pool(loaded)
    backend = choice.build(pool)
    if loaded.device.type == "cpu":
        keep_freed_memory()
    recorder = _recorder(settings, loaded, backend)
    runner = ModelRunner(loaded, pool, backend, limits, record=recorder)
    if settings.compile:
        pool.populate()  # with a compiled model, for steady steps too
        runner.compile()
    elif _may_compile(settings, recorder, cache):
        _compile_if_possible(runner)
    runner.capture()
    if recorder is not None and not cache.states and not settings.enable_lora:
        runner.capture_piecewise(recorder.pieces)
    return runner


def _may_compile(
    settings: EngineSettings, recorder: "CudaGraphRecorder | None", cache: KVCacheConfig
) -> bool:
    if settings.compile is not None or settings.enable_lora:
        return False
    return recorder is not None and not cache.states


def _compile_if_possible(runner: ModelRunner) -> None:
    """Compile, if it works: in a graph launches are cheap, but each operator reads all rows."""
    try:
        runner.compile()
    except ConfigurationError as error:
        _log.warning("the model runs uncompiled, which is slower: %s", error)


def _executor(
    settings: EngineSettings, runner: Runner, device: Device, threads: ComputeThreads
) -> Executor:
    """The executor, with two steps in its queue if requested or (None) if that is faster.

    CUDA runs beside the host by itself; the CPU gets a thread for it, which gains little if the
    model uses all cores. The processes of a divided model run one step at a time.
    """
    on_cuda = device.type == "cuda"
    ahead = on_cuda if settings.async_scheduling is None else settings.async_scheduling
    if not ahead or settings.tensor_parallel_size != 1:
        return Executor(runner, device=device)
    thread = None if on_cuda else ThreadPoolExecutor(1, "pyengine-device", threads.begin)
    return Executor(runner, thread, depth=2, device=device)


def _drafter(setup: Setup, executor: Executor) -> Drafter:
    """The drafter of the settings."""
    settings, draft = setup.settings, setup.draft
    if settings.speculation == "mtp":
        return MTPDrafter(executor, setup.cache.block_size)
    if draft is not None:
        return _draft_model(settings, executor, draft, draft.configure_cache(settings, setup.cache))
    return NgramDrafter() if settings.speculation == "ngram" else SuffixDrafter()


def _draft_model(
    settings: EngineSettings, executor: Executor, draft: LoadedDraft, cache: KVCacheConfig
) -> DraftModel:
    """A second model over its own KV cache."""
    longest, most = draft.longest, settings.max_num_batched_tokens
    limits = RunnerLimits(
        max_num_batched_tokens=most,
        max_num_seqs=settings.max_num_seqs,
        max_blocks_per_seq=-(-longest // cache.block_size),
    )
    runner = _runner(settings, draft.loaded, draft.choice, cache, limits)
    return DraftModel(executor, runner, cache.manager(), most=most, longest=longest)
