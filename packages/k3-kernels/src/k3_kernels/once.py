"""Refusal of second derivatives by ops whose backward is written by hand."""

from k3_core.custom_op.once import refuse_second_derivative

__all__ = ["refuse_second_derivative"]
