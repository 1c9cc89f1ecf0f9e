"""Where problems come from, and how they are split into phases and dealt to steps."""
