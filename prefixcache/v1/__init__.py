"""Generated messages and stubs of proto/prefixcache/v1; `python proto/generate.py` makes them."""
