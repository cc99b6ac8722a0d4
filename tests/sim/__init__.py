"""Seeded simulation of one planner among workers that misbehave. Replay one: `python -m tests.sim SEED`."""
