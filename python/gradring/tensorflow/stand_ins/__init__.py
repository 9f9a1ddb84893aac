"""Strategies that replace the ones a program asks for, or that a program without any gets."""
