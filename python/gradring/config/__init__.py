"""Settings: their table, their values from arguments and variables, and checked text."""
