"""Prices of GPU hours, typed by the user or in a dated file; bertscope knows no price itself."""

import warnings
from datetime import date
from pathlib import Path

from bertscope.errors import BertscopeWarning, SourceError
from bertscope.files import read_mapping
from bertscope.frozen import Record
from bertscope.gpus import find_gpu, typed_prices

OLD_DAYS = 90  # after which a file's prices are said to be old


class Prices(Record, kw_only=False):
    """The price of an hour of each GPU, by name, and their currency, which typed prices do not have."""

    hours: dict[str, float]
    currency: str = ""


def read_prices(prices: str) -> Prices:
    """Return the prices in `t4=0.35,l4=0.71` or in a YAML file with `date`, `currency` and `prices`.

    Warns of a file older than OLD_DAYS. Raises SourceError for a file without prices or date, SelectionError for an
    unknown GPU.
    """
    if "=" in prices:
        return Prices(typed_prices(prices))
    path = Path(prices)
    entries = read_mapping(path)
    for key in ("date", "prices"):
        if key not in entries:
            raise SourceError(f"lacks {key}; a file of prices has date, currency and prices", where=f"{path}:1")
    entries.refuse_unknown(("date", "currency", "prices"), "a file of prices")
    hours: dict[str, float] = {}
    for name, entry in entries["prices"].mapping("prices").items():
        if type(entry.value) not in (int, float) or not 0 < entry.value < 1e6:
            raise entry.error(f"{name} must be the price of an hour, a number above 0")
        hours[find_gpu(name).name] = float(entry.value)
    currency: str = entries.checked(
        "currency", "", lambda text: isinstance(text, str) and len(text) < 9, "a short word"
    )
    try:
        age = (date.today() - date.fromisoformat(str(entries["date"].value))).days
    except ValueError:
        raise entries["date"].error("date must be the day of the prices, such as 2026-11-28") from None
    if age > OLD_DAYS:
        warnings.warn(BertscopeWarning(f"the prices in {path} are {age:,} days old; look them up again"), stacklevel=2)
    return Prices(hours, currency)
