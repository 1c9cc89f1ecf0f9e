"""Ways for objects from one process to another, measured beside each other. See ``run`` and ``table``."""
