"""Records: files in which ranks leave their collectives and steps, timelines, and lateness."""
