"""The commands of `gradring`, with their work: `bench`, `demo`, `doctor`, `simulate`, `verify`."""
