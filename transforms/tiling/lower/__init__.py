"""Loops in, traced `lax.scan`s out, and the epilogue that runs on whole values between and after them."""
