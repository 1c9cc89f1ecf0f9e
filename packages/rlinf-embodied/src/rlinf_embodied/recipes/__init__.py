"""Programs that ``rlinf run`` starts."""
