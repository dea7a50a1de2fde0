"""Jaxprs in, graphs out: calls inlined, equations in one form, and functions as equations of a graph."""
