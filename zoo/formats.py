"""How matrices are kept in fewer bits (`zoo.quantised`). Free of JAX."""

from enum import StrEnum

AS_STORED = "as_stored"  # as a folder has them


class Format(StrEnum):
    """How a matrix is kept in fewer bits."""

    int8 = "int8"
    int4 = "int4"
    nf4 = "nf4"
    fp8 = "fp8"  # of four bits of exponent and three of mantissa: read and kept, not made
    mxfp4 = "mxfp4"  # of two bits of exponent and one of mantissa, likewise

    @property
    def bits(self) -> int:
        """Bits of a number, its share of a scale aside."""
        return 8 if self in (Format.int8, Format.fp8) else 4

    @property
    def made(self) -> bool:
        """Whether matrices are made so, and not kept alone."""
        return self not in (Format.fp8, Format.mxfp4)

    @property
    def group(self) -> int | None:
        """How many inputs share a scale where nothing else is said; None is all of them."""
        return {Format.int4: 128, Format.nf4: 64}.get(self)


# The quantiles of a normal distribution that four bits stand for, as bitsandbytes has them (appendix E of the paper).
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Those of MXFP4: two bits of exponent and one of mantissa behind a sign (https://arxiv.org/abs/2310.10537).
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
