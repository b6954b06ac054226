"""Kubernetes quantities: `500m`, `2Gi`, `1e3`."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(10**3), "M": Decimal(10**6),
    "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    **{unit: Decimal(1024**power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}  # fmt: skip


def parse(quantity: str | int | float) -> Decimal:
    """Return the number of a quantity. Raise ValueError if it isn't a quantity."""
    text = str(quantity).strip()
    suffix = next((s for s in (text[-2:], text[-1:]) if s in SUFFIXES), "")
    try:
        return Decimal(text.removesuffix(suffix)) * SUFFIXES.get(suffix, 1)
    except InvalidOperation:
        raise ValueError(
            f"not a quantity: {quantity!r}; expected a number with a suffix such as m, Ki, Mi, Gi"
        ) from None
