"""Traces through the same planner and policies as the daemon's, to learn what a cache of some size is worth."""
