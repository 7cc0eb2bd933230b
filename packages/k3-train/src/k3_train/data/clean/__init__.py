"""Cleaning of raw documents: rule filters, format checks, quality, duplicates (report 6).

The report names the steps and discloses no threshold: every number here is our own choice.
"""
