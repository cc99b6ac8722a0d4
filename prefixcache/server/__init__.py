"""The daemon: the thin shell around the core. It has the clock, the sockets and the threads; it decides nothing."""
