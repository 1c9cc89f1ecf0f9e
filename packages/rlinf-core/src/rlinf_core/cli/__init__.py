"""The command line: ``rlinf run | plugins | doctor``, and what ``rlinf.commands`` entry points add."""
