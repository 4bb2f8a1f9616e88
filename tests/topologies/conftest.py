"""No example of hypothesis is timed: a loaded machine is no fault of the code."""

from hypothesis import settings

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")
