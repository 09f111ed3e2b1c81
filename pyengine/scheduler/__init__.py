"""Who runs next: admission, token budget, preemption. Plain data and blocks; no torch."""

from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits, StalledError
from pyengine.scheduler.step import Entry, ScheduledStep

__all__ = ["Entry", "ScheduledStep", "Scheduler", "SchedulerLimits", "StalledError"]
