"""The task of this process, parameter servers, and the variables that are on them."""
