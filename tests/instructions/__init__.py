"""Instructions of hot paths, which are no times, against a record of them."""
