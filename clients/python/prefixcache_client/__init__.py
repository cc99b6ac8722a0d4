"""The prefixcache SDK."""
