"""Scheduling of RLinf: plain data in and out, neither ray nor torch. Here so far: profiles."""

from rlinf_sched.profile import Profile, ProfileError, ProfileSample, Summary

__all__ = ["Profile", "ProfileError", "ProfileSample", "Summary"]
