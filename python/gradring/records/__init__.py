"""Files that ranks leave of what happened: flight recorders, timelines, lateness."""
