"""The pure core of prefixcache: decides and never does.

`Planner.handle(event, now)` is the only way to change state; it answers a list of commands. There is no clock, no
randomness, no I/O and no thread in here: time and ids come in as arguments, bytes are never seen.
"""
