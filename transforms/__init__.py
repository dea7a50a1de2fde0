"""Function in, function out: transforms that know nothing of models."""

from transforms.tiling.api import tile as tile
from transforms.tiling.ir.errors import TileError as TileError
from transforms.tiling.report.plan import TilePlan as TilePlan
