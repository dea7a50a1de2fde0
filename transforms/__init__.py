"""Function in, function out: transforms that know nothing of models."""
