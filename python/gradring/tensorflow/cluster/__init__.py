"""Which task this process is, parameter servers, and the variables that are on them."""
