"""Programs that use packages of others, on two ranks and in one process."""
