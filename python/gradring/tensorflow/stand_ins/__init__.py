"""Strategies in the place of those that a program asks for."""
