"""Connected groups: communicators and their collectives over arrays and objects."""
