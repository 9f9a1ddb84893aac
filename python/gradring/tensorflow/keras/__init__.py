"""Keras under `CustomCollectiveStrategy`: its loops, layers, losses and callbacks."""
