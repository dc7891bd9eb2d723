"""Counts and bytes as text; prefixes of 1000 and of 1024 are defined in this file only."""

import json
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple


class Precision(NamedTuple):
    """A floating-point type by the name that the command line and the reports use."""

    name: str
    size_bytes: int  # of one element
    torch_name: str
    autocast: bool  # torch.autocast can compute in it


FP32 = Precision(name="fp32", size_bytes=4, torch_name="float32", autocast=False)
BF16 = Precision(name="bf16", size_bytes=2, torch_name="bfloat16", autocast=True)
FP16 = Precision(name="fp16", size_bytes=2, torch_name="float16", autocast=True)
PRECISIONS = {precision.name: precision for precision in (FP32, BF16, FP16)}
UNQUANTIZED = "none"
QUANTIZED = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")  # weights in 4 and 8 bits; -dq: their scales in 8 bits too

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", "K", "M", "G", "T", "P", "E")
_STEPS = ((_BINARY, 1024), (_DECIMAL, 1000))
_VALUES = {name: step**power for names, step in _STEPS for power, name in enumerate(names) if name}
_VALUES |= {f"{name}FLOP": 1000**power for power, name in enumerate(_DECIMAL)}


def count_text(count: int) -> str:
    """Return a count with thousands separators: `130,609,732`."""
    return f"{count:,}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 point`, `12,000 points`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def short_count_text(count: int) -> str:
    """Return a count with three or four digits and a prefix of 1000: `8.04 T` (10**12), `302.3 M`, `768`."""
    power = min((len(str(abs(count))) - 1) // 3, len(_DECIMAL) - 1)
    scaled = count / 1000**power
    return f"{scaled:.{2 if abs(scaled) < 100 else 1}f} {_DECIMAL[power]}" if power else str(count)


def flops_text(flops: int) -> str:
    """Return FLOPs with three or four digits and a prefix of 1000: `1.89 TFLOP`, `768 FLOP`."""
    number, _, prefix = short_count_text(flops).partition(" ")
    return f"{number} {prefix}FLOP"


def bytes_text(size_bytes: int, *, unit_of: int | None = None) -> str:
    """Return bytes in the binary unit that keeps the number below 1024: `413.29 MiB` (1 MiB = 2**20 B).

    `unit_of` is another size whose unit is used, unless the number would be far above 1024.
    """
    divisor, unit = binary_unit(
        size_bytes if unit_of is None or abs(size_bytes) >= 2048 * binary_unit(unit_of)[0] else unit_of
    )
    return f"{size_bytes} B" if divisor == 1 else f"{size_bytes / divisor:,.2f} {unit}"


def exact_bytes(size_bytes: int) -> str:
    """Return bytes in the largest binary unit of which they are a whole number, as `parse_bytes` reads it: `16GiB`."""
    powers = range(len(_BINARY) - 1, -1, -1) if size_bytes else (0,)
    power = next(power for power in powers if size_bytes % 1024**power == 0)
    return f"{size_bytes // 1024**power}{_BINARY[power]}"


def binary_unit(size_bytes: int) -> tuple[int, str]:
    """Return the bytes and the name of the binary unit that keeps the number below 1024: `(1048576, "MiB")`."""
    power = min(max(abs(size_bytes).bit_length() - 1, 0) // 10, len(_BINARY) - 1)
    return 1024**power, _BINARY[power]


def decimal(text: str, most: int = 9) -> int | None:
    """Return the number that at most `most` digits of ASCII write; None for any other text."""
    return int(text) if re.fullmatch(f"[0-9]{{1,{most}}}", text) else None


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: `16GiB`, `16 GB` (10**9), `512M` (binary, as in torch and ulimit) or a plain number.

    Raises ValueError for anything else.
    """
    from fractions import Fraction  # 10 ms, and most commands read no size

    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTPE]?)(i?B?)\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(text)
    number, prefix, suffix = match[1], match[2].upper(), match[3].lower()
    step = 1000 if suffix == "b" else 1024
    return int(Fraction(number) * step ** " KMGTPE".index(prefix or " "))


def unit_value(text: str) -> int | None:
    """Return the number that a text with a unit (`bytes_text`, `flops_text` ...) shows; None for other text."""
    from fractions import Fraction

    number, _, unit = text.replace(",", "").partition(" ")
    return int(Fraction(number) * _VALUES[unit]) if unit in _VALUES else None


def share_text(share: float) -> str:
    """Return a fraction of 1 as a percentage: `77.69 %`."""
    return f"{100 * share:.2f} %"


def tensors_text(tensors: Iterable[Any]) -> str:
    """Return the shapes of several tensors, with the dtype unless it is float32: `[1, 128] int64, [1, 128, 768]`.

    Three or more equal neighbours are written once: `48 x [1, 12, 16, 64]`.
    """
    texts = (shape_text(item.shape) + (f" {item.dtype}" if item.dtype != "float32" else "") for item in tensors)
    runs = ((text, len(list(equal))) for text, equal in groupby(texts))
    return ", ".join(f"{times} x {text}" if times > 2 else ", ".join([text] * times) for text, times in runs)


def shape_text(shape: tuple[int, ...] | None) -> str:
    """Return a shape as torch writes it, `[768, 3072]`; `unknown` for a lazy parameter."""
    return "unknown" if shape is None else f"[{', '.join(map(str, shape))}]"


def _escaped(text: str, allowed: str = "", *, as_json: bool = False) -> str:
    """Return the text with escapes for unprintable characters, except those in `kept`."""

    def escape(match: re.Match[str]) -> str:
        if match[0].isprintable():
            return match[0]
        return json.dumps(match[0])[1:-1] if as_json else match[0].encode("unicode_escape").decode()

    return re.sub(f"[^ -~{allowed}]", escape, text)


def visible(text: str) -> str:
    """Return the text with escapes such as `\\x1b`, `\\n` and `\\u202e` for unprintable characters."""
    return text if text.isprintable() else _escaped(text)


def visible_lines(text: str, *, color: bool = False) -> str:
    """Return the text as `visible` does, but keep line breaks and, with `color`, colour codes."""
    return _escaped(text, "\n\x1b" if color else "\n")


def json_text(data: Any) -> str:
    """Return indented JSON with escapes for unprintable characters; it parses to the same data."""
    return _escaped(json.dumps(data, indent=2, ensure_ascii=False), "\n", as_json=True) + "\n"


def html_text(text: str) -> str:
    """Return the text escaped for HTML or XML."""
    from html import escape  # its table of entities takes 5 ms, which only this function needs

    return escape(visible(text))


def unbroken_html(text: str) -> str:
    """Return the text escaped for HTML, with no line break between a number and its unit of bytes."""
    return re.sub(rf"(?<=[0-9]) (?={'|'.join(_BINARY)})", "&nbsp;", html_text(text))


def breakable_html(text: str) -> str:
    """Return the text escaped for HTML, with possible line breaks after the dots and underscores of names.

    A word of more than 20 letters may also be broken before its capital letters. `0-11` and `(12 x)` are not broken.

    >>> breakable_html("embeddings.LayerNorm")
    'embeddings.<wbr>LayerNorm'
    >>> breakable_html("layer.0-11 (12 x)")
    'layer.<wbr><b>0-11</b> <b>(12 x)</b>'
    """
    marked = re.sub(r"(?<=[^\W\d])[._](?=\w)|(?<=[0-9])\.(?=[^\W\d])", r"\g<0><wbr>", html_text(text))
    marked = re.sub(r"(?<![\w-])[0-9]+-[0-9]+(?![\w-])|\([0-9]+ x\)", r"<b>\g<0></b>", marked)
    return re.sub(r"[A-Za-z]{21,}", lambda word: re.sub(r"(?<=[a-z])(?=[A-Z])", "<wbr>", word[0]), marked)
