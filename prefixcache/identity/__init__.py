"""prefixcache.identity"""
