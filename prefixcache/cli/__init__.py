"""prefixcache.cli"""
