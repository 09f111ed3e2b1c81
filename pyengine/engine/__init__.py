"""The engine: its loop, its parts, and the outputs on their way to callers."""

from pyengine.utils.openmp import wait_briefly
from pyengine.utils.packaging import require_posix

require_posix("pyengine.engine")
wait_briefly()  # before torch is imported
