"""What holds for all tests: no test is judged by how long it took on a machine that others use too."""

from importlib.util import find_spec

if find_spec("hypothesis") is not None:  # not in the engines' environment
    from hypothesis import settings

    settings.register_profile("prefixcache", deadline=None)
    settings.load_profile("prefixcache")
