"""prefixcache.core.policy"""
