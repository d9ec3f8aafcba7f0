"""Hooks inside inference engines that people already run, one folder for each engine."""
