"""How hypothesis runs here: the same examples every time, and no time limit, since machines differ."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable",
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors],  # a contract's test runs in every class that inherits it
)
settings.load_profile("repeatable")
