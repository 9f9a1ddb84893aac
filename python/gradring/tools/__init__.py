"""Commands: `gradring run`, `doctor`, `bench`, `demo`, `simulate`."""
