"""Bytes: pools, copies, codecs. Imports nothing of prefixcache; knows slots and bytes, not tokens."""
