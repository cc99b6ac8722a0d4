"""The command line: `prefixcache serve`, `status`, `describe`, `clear`, `config`, `bench`, `demo`.

The only package that imports both the server and the client. `main` declares the commands and imports nothing of ours
until one of them runs, so `prefixcache --help` answers at once; a module per command does the work.
"""
