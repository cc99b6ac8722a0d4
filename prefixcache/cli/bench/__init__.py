"""`prefixcache bench`: what the cache costs, beside the limit of each figure, measured in one interleaved run.

A module per section, each with `run(plan, progress) -> result`; `measure` does the timing, `daemon` and `echo` are the
processes measured against. Nothing here is imported unless `prefixcache bench` runs.
"""
