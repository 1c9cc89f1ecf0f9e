"""Settings of this package's tests."""

from hypothesis import settings

settings.register_profile("algos", max_examples=15, deadline=None, print_blob=True)
settings.load_profile("algos")
