"""An LLM inference engine whose KV-cache block manager is written in Rust.

Two independent entry points, loaded at first use:

- `BlockManager` and its handles (`Sequence`, `StepPlan`, `Pin`, ...) are for people who build
  engines. They need NumPy only.
- `LLM` and `SamplingParams` are for people who run models. `LLM` needs the
  distribution's extra `engine`; with the extra `torch` it also runs on CUDA.
"""

_MODULES = {
    "pyengine.async_engine": "AsyncEngine",
    "pyengine.kv_cache": "BlockManager Extended KvError Loading NoBudget NoRoom Pin PoolUsage "
    "Prefilled Remapping ReplayReport Sequence SharedPrefixes Stats StepBuffers StepPlan Transfer "
    "replay",
    "pyengine.llm": "LLM",
    "pyengine.outputs": "BeamSearchOutput BeamSearchSequence ClassificationRequestOutput "
    "CompletionOutput EmbeddingRequestOutput RequestOutput ScoringRequestOutput",
    "pyengine.pooling_params": "PoolingParams",
    "pyengine.request.lora": "LoRARequest",
    "pyengine.sampling_params": "BeamSearchParams RequestOutputKind SamplingParams "
    "StructuredOutputs",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
_ENGINE = {"LLM", "AsyncEngine"}

__all__ = [*_MODULE_OF, "__version__"]  # noqa: PLE0604


def _resolve(name: str) -> object:
    """Resolve public names on first use."""
    if name == "__version__":
        from pyengine.utils.packaging import package_version

        value: object = package_version()
    elif name in __all__:
        from importlib import import_module

        from pyengine.utils.gc_pause import paused_gc

        if name in _ENGINE:
            from pyengine.utils.packaging import require_engine_extra, require_posix

            require_posix(f"pyengine.{name}")
            require_engine_extra(f"pyengine.{name}")
        try:
            with paused_gc():
                value = getattr(import_module(_MODULE_OF[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "pyengine._kv":
                raise
            from pyengine.utils.packaging import needs_extension

            message = needs_extension(f"pyengine.{name}")
            raise ModuleNotFoundError(message, name=error.name) from None
    else:
        raise AttributeError(f"module 'pyengine' has no attribute {name!r}")
    globals()[name] = value
    return value


__getattr__ = _resolve


def __dir__() -> list[str]:
    """Every public name, resolved or not."""
    return sorted(set(globals()) | set(__all__))
