r"""Values of expressions in LaTeX, as keys: equal expressions have one, however they are spelled.

latex2sympy2_extended, the parser of Math-Verify, of the extra `latex`, reads an expression as a
tree, unevaluated. The key of f is its values at three points, in which each symbol has a number
drawn from its name:

    f(p_1); f(p_2); f(p_3)    fractions where they are exact, else 20 of 60 digits

Different expressions have different keys, unless all three points happen to be roots of their
difference. Equality of keys is an equivalence, which a comparison of pairs need not be: it depends
on no order of the answers.

The time is bounded without an alarm, which only a main thread can set: an expression is short, its
brackets shallow and its powers small (`_bounded`), and nothing is simplified or solved. Others have
no key.
"""

import math
import os
import re
import threading
import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from csd.evaluate.answers.numbers import spelled
from csd.utils.lazy import check_installed

_LENGTH = 200  # characters
_DEPTH = 8  # brackets inside each other
_SIZE = 10**6  # digits of the largest power
_BITS = 4096  # of an exact number
_POINTS = 3
_DIGITS, _KEPT = 60, 20
# commands of LaTeX; the parser evaluates others at once, such as integrals and determinants
_COMMAND = re.compile(
    r"alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|omega|phi|varphi|psi|rho|sigma|tau"
    r"|Delta|Omega|pi|[dtc]?frac|sqrt|cdot|times|div|d?binom|(?:arc)?(?:sin|cos|tan)|cot|sec|csc"
    r"|sinh|cosh|tanh|log|ln|exp|[lr]floor|[lr]ceil"
)
# functions of mpmath
_FUNCTIONS = "exp|log|sin|cos|tan|cot|sec|csc|asin|acos|atan|sinh|cosh|tanh|floor|ceil"
# a number in a base, two side by side, a ratio or time, a date, a tower of numbers, the factorial
# of a large number or of an expression
_OTHER = re.compile(
    r"\d\s*_|(?<!_)\d\s+\d|:|\d/\d+/\d|\d{4}-\d\d-\d\d"
    r"|[\d)}]\s*\^\s*\{?[^{})A-Za-z]*\^|[)}!]\s*!|\d{4}\s*!"
)
_POWER = re.compile(r"\^\s*\{?\s*[-(]*(\d+)")
# the parser adds a number to the one behind it, which is right in 2\frac{1}{2} alone
_PRODUCT = re.compile(r"(?<![_\d]\d)(?<=\d)\s*(?=\()|(?<=\))\s*(?=[(\d])")

# held while the parser's caches and mpmath's precision are used
_LOCK = threading.RLock()


def _in_child() -> None:
    global _LOCK
    _LOCK = threading.RLock()


# a lock that another thread holds at a fork is never released in the child
os.register_at_fork(after_in_child=_in_child)


def value(text: str) -> str | None:
    """Key of an expression; of a constant one its value alone, None for what is no expression.

    Raises ImportError, for what may be an expression, where the parser is not installed.
    """
    with _LOCK:
        values = _values(text)
        if values is None:
            return None
        if all(isinstance(v, Fraction) and v == values[0] for v in values):
            return spelled(values[0])
        shown = [_numbers().shown(v) for v in values]
        return shown[0] if len({*shown}) == 1 else "; ".join(shown)


def multiple(text: str, positive: bool) -> str | None:
    """Key of an expression that its multiples have too, or only those by positive factors."""
    with _LOCK:
        values = _values(text)
        if values is None or not values[0]:
            return None
        first = abs(values[0]) if positive else values[0]
        return "; ".join(_numbers().shown(v / first) for v in values)


def _values(text: str) -> list[Any] | None:
    if not _bounded(text):
        return None
    what = f"the comparison of answers that are expressions, such as {text!r},"
    check_installed("latex2sympy2_extended", "latex", what)
    parse, numbers = _parser(), _numbers()
    try:
        tree = parse(_PRODUCT.sub(r"\\cdot ", text))
        return [numbers.of(tree, point) for point in range(_POINTS)]
    # the parser raises Exception itself for what it cannot read, and others from within
    except Exception:
        return None


def _bounded(text: str) -> bool:
    if len(text) > _LENGTH or not text.isascii() or _OTHER.search(text):
        return False
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    digits = max(map(len, re.findall(r"\d+", text)), default=1)
    size = digits * math.prod(max(1, int(power)) for power in _POWER.findall(text))
    if "binom" in text or "!" in text:
        # their numbers are below 1000
        size *= 1000
        if "binom" in text and digits > 3:
            return False
    return (
        deepest <= _DEPTH
        and size <= _SIZE
        and all(map(_COMMAND.fullmatch, re.findall(r"\\([A-Za-z]+)", text)))
    )


@cache
def _parser() -> Callable[[str], Any]:
    """The library, imported with the first expression: SymPy alone takes a second."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    normalization = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    conversion = ConversionConfig(lowercase_symbols=False)
    return lambda text: latex2sympy(
        normalize_latex(text, normalization),
        is_real=True,
        normalization_config=None,
        conversion_config=conversion,
    )


class _Numbers:
    """Values of trees: a Fraction where it is exact, else a number of mpmath."""

    def __init__(self) -> None:
        import mpmath

        # its own context, because all code of a process shares the precision of mpmath.mp
        self.mp = mpmath.MPContext()
        self.mp.dps = _DIGITS
        functions = {name: getattr(self.mp, name) for name in _FUNCTIONS.split("|")}
        self.functions = {**functions, "Abs": abs, "ceiling": self.mp.ceil}

    def of(self, tree: Any, point: int) -> Any:
        """Value at a point. Raises ValueError, KeyError or ArithmeticError without one."""
        name = tree.func.__name__
        if tree.is_Rational:
            return Fraction(int(tree.p), int(tree.q))
        if tree.is_Float:
            return Fraction(str(tree))
        if name in ("Pi", "Exp1"):
            return +(self.mp.pi if name == "Pi" else self.mp.e)
        if tree.is_Symbol or name == "ImaginaryUnit":
            return self._symbol(str(tree), point)
        values = [self.of(part, point) for part in tree.args]
        if name == "Pow":
            return self._power(*values)
        if name in ("Add", "Mul"):
            total = values[0]
            for term in values[1:]:
                if not isinstance(total, Fraction) or not isinstance(term, Fraction):
                    total, term = self._inexact(total), self._inexact(term)
                total = self._finite(total + term if name == "Add" else total * term)
            return total
        if isinstance(values[0], Fraction):
            exact: dict[str, Callable] = {"factorial": self._factorial, "Abs": abs}
            if name in exact:
                return exact[name](values[0])
        return self._finite(self.functions[name](*map(self._inexact, values)))

    def _symbol(self, name: str, point: int) -> Any:
        if name in ("i", "I"):
            return self.mp.j
        if name in ("e", "E"):
            return +self.mp.e
        drawn = zlib.crc32(f"{name} {point}".encode())
        # all positive, all negative, and of both signs
        sign = (1, -1, 1 - (drawn >> 20 & 2))[point]
        return Fraction(sign * (50 + drawn % 251), 101)

    def _factorial(self, number: Fraction) -> Fraction:
        if number.denominator > 1 or number > 1000:
            raise ValueError("the factorial of a fraction, or a large one")
        return Fraction(math.factorial(int(number)))

    def _power(self, base: Any, power: Any) -> Any:
        if isinstance(power, Fraction) and power.denominator > 1:
            if power.denominator % 2 and self.mp.im(self._inexact(base)) == 0 and base < 0:
                # the real root
                return (-1) ** power.numerator * self._power(-base, power)
            if power == Fraction(1, 2) and isinstance(base, Fraction) and base >= 0:
                root = Fraction(math.isqrt(base.numerator), math.isqrt(base.denominator))
                if root * root == base:
                    return root
        elif isinstance(power, Fraction) and isinstance(base, Fraction):
            if abs(power) * max(map(int.bit_length, base.as_integer_ratio())) > _BITS:
                raise ValueError("a large power")
            return base ** int(power)
        base, power = self._inexact(base), self._inexact(power)
        if not base or abs(power) * (1 + abs(self.mp.log(base))) > _BITS:
            raise ValueError("a large power, or one of 0")
        return self._finite(base**power)

    def _finite(self, number: Any) -> Any:
        if isinstance(number, Fraction):
            if max(map(int.bit_length, number.as_integer_ratio())) > _BITS:
                raise ValueError("a large number")
        elif not self.mp.isfinite(number):
            raise ValueError("no number")
        return number

    def _inexact(self, number: Any) -> Any:
        if isinstance(number, Fraction):
            return self.mp.mpf(number.numerator) / number.denominator
        return number

    def shown(self, number: Any) -> str:
        """A number in digits, or as the fraction that it is."""
        number = self._inexact(number)
        real, imaginary = self._real(self.mp.re(number)), self._real(self.mp.im(number))
        return real if imaginary == "0" else f"{real} + {imaginary}i"

    def _real(self, number: Any) -> str:
        exact = Fraction(self.mp.nstr(number, _DIGITS))
        # the sine of \frac{\pi}{6} is 1/2
        near = exact.limit_denominator(10**6)
        if abs(exact) < 10**15 and abs(exact - near) < Fraction(1, 10**45):
            return spelled(near)
        return self.mp.nstr(number, _KEPT)


_numbers = cache(_Numbers)
