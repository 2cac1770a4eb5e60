"""Math and numeric answers: find the answer's number, compare it with the label's.

    response ── last \\boxed{…}, else what follows the last "####", else all of it
             ── the last number in that: 42  -1,234.5  3/4  \\frac{3}{4}  1 1/2  50%  1.5e3  1.5 × 10^3

Numbers are exact fractions, so 1/3 and 0.1 are what they say. Every step is linear in the length of the text, and
a number with more than 400 digits or a larger power of ten is compared by its digits, never expanded: neither
`1e999999999` nor a million digits cost more than reading them.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

from consumers.rewards.types import RewardInput, option

_MAX_DIGITS = 400
_DEFAULT_REL_TOL = 1e-6

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w.)\]}}])[-+])?\$?
    (?:
        (?:(?P<whole>[0-9]{{1,30}})[ ]?)?
          \\frac\{{(?P<tex_sign>-?)(?P<tex_over>{_DECIMAL})\}}\{{(?P<tex_under>{_DECIMAL})\}}
      | (?P<mixed>[0-9]{{1,30}})[ ](?P<mixed_over>[0-9]{{1,30}})/(?P<mixed_under>[0-9]{{1,30}})
      | (?P<over>{_DECIMAL})[ ]?/[ ]?(?P<under>{_DECIMAL})
      | (?P<plain>{_DECIMAL})
          (?: [eE](?P<e>[-+]?[0-9]+)
            | [ ]?(?:×|x|\*|\\times|\\cdot)[ ]?10(?:\^|\*\*)[{{(]?(?P<power>[-+]?[0-9]+)[}})]?
            | \^[{{]?(?P<ten>[-+]?[0-9]+)[}}]?
          )?
    )
    (?:[ ]?(?P<percent>\\?%))?
    """,
    re.VERBOSE,
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FORMULA_BEFORE = re.compile(r"[A-Za-z(^_=\\]")
_FORMULA = re.compile(r"\s*[-+*/^_=(]|[A-Za-z]|\s*\\(?!text|mathrm|circ)|\s*[A-Za-z]\s*[-+*/^=]")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class Number(NamedTuple):
    """`value` exactly, or, where that is too large to write out, a key that is equal for equal numbers."""

    value: Fraction | str
    is_percent: bool = False


def reward(sample: RewardInput, *, rel_tol: float | None = None, abs_tol: float = 0.0) -> float:
    """1.0 iff the response's answer equals the label within tolerance.

    Two whole numbers must be equal; otherwise the difference may be 1e-6 of the label. With `rel_tol` or `abs_tol`
    given, any difference up to the larger of `rel_tol · |label|` and `abs_tol` is right. If one side alone has a
    percent sign, 50 % equals both 0.5 and 50. If the label holds no number, the boxed texts must be equal but for
    blanks. Raises ValueError without a label.
    """
    if sample.label is None or isinstance(sample.label, bool):
        raise ValueError(
            f"{sample.uid}: the numeric reward needs a label: a number or a text, got {sample.label!r}"
        )
    rel_tol, abs_tol = option(sample, "rel_tol", rel_tol), option(sample, "abs_tol", abs_tol)
    label_text, answer_text = extract(_text(sample.label)), extract(sample.response)
    label = last_number(label_text, whole_text=True)
    if label is None:
        return float(_bare(answer_text) == _bare(label_text) != "")
    answer = last_number(answer_text)
    return float(answer is not None and equal(answer, label, rel_tol, abs_tol))


def equal(answer: Number, label: Number, rel_tol: float | None = None, abs_tol: float = 0.0) -> bool:
    """Compare by the rules of `reward`."""
    if isinstance(answer.value, str) or isinstance(label.value, str):
        return answer.value == label.value and answer.is_percent == label.is_percent
    if answer.is_percent == label.is_percent:
        return _close(answer.value, label.value, rel_tol, abs_tol)
    percent, plain = (answer, label) if answer.is_percent else (label, answer)
    assert isinstance(percent.value, Fraction) and isinstance(plain.value, Fraction)
    return _close(percent.value / 100, plain.value, rel_tol, abs_tol) or _close(
        percent.value, plain.value, rel_tol, abs_tol
    )


def _close(answer: Fraction, label: Fraction, rel_tol: float | None, abs_tol: float) -> bool:
    if answer == label:
        return True
    if rel_tol is None and not abs_tol:
        if answer.denominator == label.denominator == 1:
            return False
        rel_tol = _DEFAULT_REL_TOL
    return abs(answer - label) <= max(Fraction(rel_tol or 0) * abs(label), Fraction(abs_tol))


def extract(text: str) -> str:
    """The part of a text that holds the answer."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    return text[text.rfind("####") + 4 :] if "####" in text else text


def _last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{…} whose braces close; None if there is none."""
    openings = list(_BOXED.finditer(text))
    for opening in reversed(openings[-8:]):  # a bound: unclosed ones must not make this quadratic
        depth = 1
        for brace in _BRACE.finditer(text, opening.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                return text[opening.end() : brace.start()]
    return None


def last_number(text: str, *, whole_text: bool = False) -> Number | None:
    """The last number in a text. `whole_text`: only if the text is nothing but it, signs and a unit apart."""
    text = _plain(text)
    last = None
    count = 0
    for last in _NUMBER.finditer(text):  # noqa: B007
        count += 1
    if last is None:
        return None
    if whole_text and (
        count > 1 or _FORMULA_BEFORE.search(text[: last.start()]) or _FORMULA.match(text, last.end())
    ):
        return None  # a formula or a list that happens to hold numbers
    return _read(last)


def _plain(text: str) -> str:
    """Bring spellings of the same thing together, without changing what is a number."""
    for spelling, plain in (
        ("−", "-"),
        ("–", "-"),
        ("\\left", ""),
        ("\\right", ""),
        ("{,}", ","),
        ("\\!", ""),
        ("\\,", ""),
        ("\\$", "$"),
        ("\\dfrac", "\\frac"),
        ("\\tfrac", "\\frac"),
        ("\u00a0", " "),
        ("\u202f", " "),
    ):
        text = text.replace(spelling, plain)
    # \frac34 and \frac{3}4 are legal TeX
    return re.sub(r"\\frac\s*(\{[^{}]*\}|[0-9])\s*(\{[^{}]*\}|[0-9])", _braced, text)


def _braced(match: re.Match[str]) -> str:
    over, under = (part.strip("{} ") for part in match.groups())
    return f"\\frac{{{over}}}{{{under}}}"


def _read(match: re.Match[str]) -> Number | None:
    part = match.groupdict()
    negative = part["sign"] == "-"
    is_percent = part["percent"] is not None
    if part["plain"] is not None:
        exponent = part["e"] or part["power"] or "0"
        if part["ten"] is not None:
            if part["plain"] != "10":
                return None  # powers of another base are formulas, not numbers
            return _decimal("1", part["ten"], negative, is_percent)
        return _decimal(part["plain"], exponent, negative, is_percent)
    if part["tex_over"] is not None:
        negative ^= part["tex_sign"] == "-"
        whole, over, under = part["whole"] or "0", part["tex_over"], part["tex_under"]
    elif part["mixed"] is not None:
        whole, over, under = part["mixed"], part["mixed_over"], part["mixed_under"]
    else:
        whole, over, under = "0", part["over"], part["under"]
    parts = [_decimal(each, "0", False, False) for each in (whole, over, under)]
    values = [each.value for each in parts if each is not None and isinstance(each.value, Fraction)]
    if len(values) < 3 or values[2] == 0:
        return None
    value = values[0] + values[1] / values[2]
    return Number(-value if negative else value, is_percent)


def _decimal(digits: str, exponent: str, negative: bool, is_percent: bool) -> Number | None:
    """digits · 10^exponent, without ever expanding a large power."""
    size = exponent.lstrip("+-").lstrip("0") or "0"  # int() of a million zeros would be slow or refused
    if len(size) > 9:
        return None
    whole, _, part = digits.replace(",", "").partition(".")
    mantissa = (whole + part).lstrip("0")
    power = (-int(size) if exponent.startswith("-") else int(size)) - len(part)
    stripped = mantissa.rstrip("0")
    power += len(mantissa) - len(stripped)
    if not stripped:
        return Number(Fraction(0), is_percent)
    sign = "-" if negative else ""
    if len(stripped) > _MAX_DIGITS or abs(power) > _MAX_DIGITS:
        return Number(f"{sign}{stripped}e{power}", is_percent)
    value = int(stripped) * Fraction(10) ** power
    return Number(-value if negative else value, is_percent)


def _text(label: Any) -> str:
    return repr(label) if isinstance(label, float) else str(label)


def _bare(text: str) -> str:
    return "".join(text.replace("$", "").split()).rstrip(".")
