"""Adapters. In: a model, and matrices to adapt or a folder of PEFT's format. Out: the model with `LowRank` matrices."""

from zoo.adapters.peft import load as load
from zoo.adapters.peft import save as save
