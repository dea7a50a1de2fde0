"""Function in, function out: transforms that know nothing of models."""

from transforms.placement import TileError as TileError
from transforms.plan import TilePlan as TilePlan
from transforms.tile import tile as tile
