"""Settings for all tests: Hypothesis sets no time limit per example, since test machines are shared and slow."""

from hypothesis import settings

settings.register_profile("tests", deadline=None, print_blob=True)
settings.load_profile("tests")
