"""Who runs next: admission, token budget, preemption. Plain data and blocks; no torch."""

from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits, StalledError
from pyengine.scheduler.step import Entry, Job, ScheduledStep

__all__ = ["Entry", "Job", "ScheduledStep", "Scheduler", "SchedulerLimits", "StalledError"]
