"""Derivatives: the joint graph of a function and its gradient is a program again.

What passes from the forward program to the backward one are residuals.
"""
