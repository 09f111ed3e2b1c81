"""Where the time of a step goes on CPUs, part by part, beside what the machine allows.

`parts` counts the bytes and operations of each part, `machine` measures what this machine reads and
multiplies in a second, `timers` times the parts of a running engine, and `tables` sets them side by
side. `python -m benches.engine.floor` runs them.
"""
