"""Measuring a model: suites as plugins, each figure a row that says how it came about."""
