"""prefixcache: prefix caching and KV offloading for LLM inference. See ARCHITECTURE.md."""
