"""prefixcache.core"""
