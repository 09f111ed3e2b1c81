"""Replicas on this machine: starts and stops a local Ray together with the server."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from pyengine.cluster.ray_app import RayReplicas, engines
from pyengine.cluster.remote_engine import RemoteEngine
from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError

_STORE_BYTES = 256 << 20
"""Size of Ray's object store, which holds prompts and outputs in transit."""


@contextmanager
def local_replicas(settings: EngineSettings, num_replicas: int) -> Iterator[RemoteEngine]:
    """Start Ray and replicas, and stop them at the end of the block.

    Each replica gets a share of the cores, and a GPU per process of its model if there are GPUs.
    All of them share the folder of `kv_cache_dir`.
    Raises `ConfigurationError` if a replica cannot be created.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    size = settings.tensor_parallel_size
    if settings.kv_cache_dir is not None:  # replicas may have another working directory
        settings = replace(settings, kv_cache_dir=Path(settings.kv_cache_dir).absolute())
    cores = os.cpu_count() or 1
    share = max(1, cores // (num_replicas * size))
    ray.init(
        address="local",
        num_cpus=max(cores, share * num_replicas * size),
        include_dashboard=False,
        logging_level="ERROR",
        object_store_memory=_STORE_BYTES,
    )
    try:
        num_gpus = _gpus_of_a_process(settings, num_replicas * size)
        logging = LoggingConfig(log_level="WARNING", enable_access_log=False)
        serve.start(proxy_location="Disabled", logging_config=logging)
        try:
            handle = serve.run(
                engines(
                    asdict(settings), num_replicas=num_replicas, num_cpus=share, num_gpus=num_gpus
                ),
                name="pyengine",
                route_prefix=None,
                logging_config=logging,
            )
        except RuntimeError as error:
            raise ConfigurationError(f"the replicas could not be started: {error}") from error
        replicas = RayReplicas(handle)
        yield RemoteEngine(replicas, handle.about.remote().result(), seed=settings.seed)
    finally:
        with redirect_stdout(StringIO()):  # Ray prints errors of calls that its shutdown cancels
            serve.shutdown()
            ray.shutdown()


def _gpus_of_a_process(settings: EngineSettings, num_processes: int) -> int:
    num_available = int(ray.cluster_resources().get("GPU", 0))
    if not num_available or str(settings.device) == "cpu":
        return 0
    if num_available < num_processes:
        raise ConfigurationError(
            f"{num_processes} processes need a GPU each, and there are {num_available}: give fewer "
            "replicas, a smaller tensor_parallel_size, or device=cpu"
        )
    return 1
