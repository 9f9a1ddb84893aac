"""Settings: the table, values from arguments and variables, checked text."""
