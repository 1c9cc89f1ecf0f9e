"""Rollout backends (entry-point group ``rlinf.rollouts``)."""
