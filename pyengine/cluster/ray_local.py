"""Replicas on this machine: a Ray of its own that comes and goes with the server."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from io import StringIO

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from pyengine.cluster.ray_app import RayReplicas, engines
from pyengine.cluster.remote_engine import RemoteEngine
from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError

_STORE_BYTES = 256 << 20
"""Of Ray's object store, which holds prompts and outputs on their way."""


@contextmanager
def local_replicas(settings: EngineSettings, num_replicas: int) -> Iterator[RemoteEngine]:
    """Start replicas and what they need, for as long as the block lasts; none stays behind.

    Each gets a share of the cores, and on a machine with GPUs one for each process of its model.
    Raises `ConfigurationError` where a replica cannot be made.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    size = settings.tensor_parallel_size
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
                    asdict(settings),
                    num_replicas=num_replicas,
                    num_cpus=share,
                    num_gpus=num_gpus,
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
        with redirect_stdout(StringIO()):  # Ray's complaints of calls that its own end cut off
            serve.shutdown()
            ray.shutdown()


def _gpus_of_a_process(settings: EngineSettings, num_processes: int) -> int:
    found = int(ray.cluster_resources().get("GPU", 0))
    if not found or str(settings.device) == "cpu":
        return 0
    if found < num_processes:
        raise ConfigurationError(
            f"{num_processes} processes of models and {found} GPUs: give fewer replicas, a smaller "
            "tensor_parallel_size, or device=cpu"
        )
    return 1
