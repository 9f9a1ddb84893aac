"""Helpers that several folders of tests use, and programs of the Makefile."""
