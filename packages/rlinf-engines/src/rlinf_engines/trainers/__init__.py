"""Trainer backends (entry-point group ``rlinf.trainers``)."""
