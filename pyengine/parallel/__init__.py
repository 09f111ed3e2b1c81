"""One model over several processes: workers, messages, shards. Tensor parallelism."""

from pyengine.parallel.distributed import DistributedRunner, Team
from pyengine.parallel.messages import RunnerSetup

__all__ = ["DistributedRunner", "RunnerSetup", "Team"]
