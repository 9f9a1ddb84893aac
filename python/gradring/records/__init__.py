"""Records: files that ranks leave (flight records, timelines, trainings), and their lateness."""
