"""Reasoning workloads: tasks, rewards, sequence batches, and the workers and recipes that train a language model.

Importing the package or its worker modules loads neither ray, torch nor transformers.
"""
