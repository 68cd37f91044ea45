"""Numbers with their units, as people read them."""

from __future__ import annotations

__all__ = ["percent", "plural", "seconds"]


def seconds(value: float | None) -> str:
    """Write a time with a unit that fits.

    >>> seconds(0.00001234), seconds(0.25), seconds(None), seconds(12345.6)
    ('12.3 us', '250 ms', '', '12,346 s')
    """
    if value is None:
        return ""
    if value >= 999.5:
        return f"{value:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size * 0.9995 or unit == "us":
            return f"{value / size:.3g} {unit}"
    return ""


def percent(part: float, whole: float) -> str:
    """Write a share; only all is 100 % and only nothing is 0 %.

    >>> percent(1, 3), percent(1, 1000), percent(999, 1000), percent(0, 5), percent(5, 5)
    ('33 %', '<1 %', '>99 %', '0 %', '100 %')
    """
    found = 100 * part / whole if whole else 0.0
    if 0 < found < 1:
        return "<1 %"
    if 99 < found < 100:
        return ">99 %"
    return f"{found:.0f} %"


def plural(count: int, what: str) -> str:
    """Write how many there are.

    >>> plural(1, "rank"), plural(1200, "rank"), plural(2, "process")
    ('1 rank', '1,200 ranks', '2 processes')
    """
    ending = "" if count == 1 else "es" if what.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{count:,} {what}{ending}"
