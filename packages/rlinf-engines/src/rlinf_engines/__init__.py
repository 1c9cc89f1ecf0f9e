"""Trainer and rollout backends. Importing this package loads neither torch nor transformers.

Backends are found by name through the entry-point groups ``rlinf.trainers`` and ``rlinf.rollouts``.
"""
