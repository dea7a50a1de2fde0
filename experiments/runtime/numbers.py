"""How quantities are said: three digits, and a unit of the right size."""

GIB = 2**30


def size(count: float, digits: int = 2) -> str:
    """Return bytes in MiB or GiB: `4.67 GiB`."""
    if count >= GIB:
        return f"{count / GIB:,.{digits}f} GiB"
    return f"{count / 2**20:,.{digits - 1}f} MiB"


def quantity(value: float, unit: str = "") -> str:
    """Return a number to three digits with a decimal prefix: `1.93 TFLOP`, `2.10k`."""
    scales = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    prefix, scale = next(((p, s) for p, s in scales.items() if value >= s), ("", 1.0))
    return f"{digits(value / scale)}{' ' if unit else ''}{prefix}{unit}"


def digits(value: float) -> str:
    """Return a number to three significant digits, trailing zeros kept so that columns stay in line."""
    return f"{value:#.3g}".rstrip(".")
