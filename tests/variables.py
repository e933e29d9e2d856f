"""The variables of the environment that tests decide about."""

PREFIX = "AUTO_MIXED_PRECISION"
NOT_INHERITED = ("PYTHON", "RANK", "LOCAL_RANK", "TORCH_", PREFIX)
"""How the names of those begin that a script in a new interpreter does not get."""
