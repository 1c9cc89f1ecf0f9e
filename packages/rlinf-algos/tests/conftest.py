"""Settings of this package's tests."""

from hypothesis import settings

settings.register_profile("algos", max_examples=15, deadline=None, print_blob=True)
settings.register_profile("deep", max_examples=500, deadline=None, print_blob=True)  # --hypothesis-profile=deep
settings.load_profile("algos")
