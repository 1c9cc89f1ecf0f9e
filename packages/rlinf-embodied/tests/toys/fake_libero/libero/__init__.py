"""Stands for LIBERO where it is not installed: what of it our plugin uses, with its habits, and nothing to draw."""
