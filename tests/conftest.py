"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# No test asserts on time, also not through a deadline per example: a busy machine is not a failure.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")
