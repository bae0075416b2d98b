"""What pages show of the kernels, read from their sources and from the table of variants.

Each function returns reStructuredText or raises a LookupError, which fails the build: a page cannot
show what the sources no longer have.
"""

import functools
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from fa_cupy.gpu.kernels.registry import ROWS

KERNELS = Path(__file__).parents[1] / "cuda_src"
REGISTERS = 65536  # of a multiprocessor
INIT = re.compile(r"\binit\(\s*shared\.(\w+)(?:\[[^\]]*\])*,\s*(.+?)\);", re.DOTALL)
CONSTANTS = re.compile(r"^constexpr \w+ (k[A-Z]\w* = [^;{}]+);", re.MULTILINE)


def table(head, rows):
    """Return a list-table of cells, the first row its header."""
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: auto", ""]
    for row in (head, *rows):
        lines += [f"   {'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(row)]
    return "\n".join([*lines, ""])


@functools.cache
def files(stem):
    """Return the files of one kernel: its source and the headers that only it includes."""
    own = [KERNELS / f"{stem}{suffix}" for suffix in (".cuh", ".cu")]
    found = [*(path for path in own if path.exists()), *sorted((KERNELS / stem).glob("*.cuh"))]
    if not found:
        raise LookupError(f"cuda_src has no {stem}")
    return found


@functools.cache
def text_of(stem):
    """Return the text of a kernel's files, or of one header that is named with its suffix."""
    paths = [KERNELS / stem] if Path(stem).suffix else files(stem)
    return "\n".join(path.read_text() for path in paths)


def rows_of(stem):
    """Return the variants of one kernel."""
    found = [row for row in ROWS if row.source == stem]
    if not found:
        raise LookupError(f"the registry has no variant of {stem}")
    return found


# ------------------------------------------------------------------------------------- constants
@functools.cache
def constants(stem):
    """Return {name: expression} of the constants that a file or the files of a kernel define.

    And of those that it defines where a variant does not.
    """
    text = re.sub(r"//.*", "", text_of(stem))
    found = dict(re.findall(r"^#define (FA_\w+) (\d+)$", text, re.MULTILINE))
    for match in CONSTANTS.finditer(text):
        for part in re.split(r",\s*(?=k[A-Z]\w* =)", match[1]):
            name, _, expression = part.partition(" = ")
            found[name.strip()] = " ".join(expression.split())
    return found


@functools.cache
def headers(stem):
    """Return the headers of cuda_src/common that a kernel includes, or (stem "") all of them."""
    if not stem:
        return sorted(f"common/{path.name}" for path in (KERNELS / "common").glob("*.cuh"))
    found, waiting = set(), [stem]
    while waiting:
        includes = re.findall(r'#include "cuda_src/(common/\w+\.cuh)"', text_of(waiting.pop()))
        waiting += set(includes) - found
        found |= set(includes)
    return sorted(found)


def expression_of(stem, name):
    """Return the expression that defines a constant, for a kernel or (stem "") for all of them."""
    own = constants(stem) if stem else {}
    if name in own:
        return own[name]
    shared = {constants(header).get(name) for header in headers(stem)} - {None}
    if len(shared) != 1:
        raise LookupError(f"{len(shared)} definitions of {name} for {stem or 'cuda_src/common'}")
    return shared.pop()


def evaluate(stem, expression, defines):
    """Return the value of an expression of constants and of the defines of a variant."""

    def value(match):
        name = match[0]
        if name in defines:
            return str(defines[name])
        return f"({python(expression_of(stem, name))})"

    def python(text):
        condition, question, rest = text.partition(" ? ")
        if question and condition.count("(") == condition.count(")"):
            yes, _, no = rest.partition(" : ")
            return f"(({python(yes)}) if ({python(condition)}) else ({python(no)}))"
        text = re.sub(r"(?<=\d)\.?0?f\b", "", text).replace("!", " not ")
        text = text.replace("&&", " and ").replace("||", " or ").replace("/", "//")
        return re.sub(r"\b(?:k[A-Z]|FA_)\w*", value, text)

    def ternary(match):
        return f"({python(match[1])})"

    inner = re.sub(r"\(([^()]* \? [^()]*)\)", ternary, expression)
    return int(eval(python(inner), {"__builtins__": {}}))


def values_of(stem, expression):
    """Return the values of an expression for all variants of a kernel, ascending."""
    return sorted({evaluate(stem, expression, dict(row.defines)) for row in rows_of(stem)})


def constant(text):
    """Return ``kName = number`` for the text of a role: ``kName``, or ``stem kName``."""
    stem, _, name = text.rpartition(" ")
    expression = expression_of(stem, name)
    plain = re.sub(r"(?<=\d)\.0f$", "", expression)
    if not re.fullmatch(r"-?[\d.]+", plain):
        plain = ", ".join(map(str, values_of(stem, expression)))
    return f"{name} = {plain}"


# --------------------------------------------------------------------------------- parts of a page
def kernel(stem):
    """Return where a kernel is, and its variants."""
    rows = rows_of(stem)
    lines = [f"``cuda_src/{stem}.cu``, entry ``{rows[0].entry}``.", ""]
    return "\n".join(lines)


def variants(stem):
    """Return the variants of one kernel, both 16-bit types in one line."""
    seen = {}
    for row in rows_of(stem):
        what = row.name.partition(f"-s{row.stages}")[2]
        seen.setdefault((row.dim, row.tile_m, row.tile_n, row.warps, row.stages, what), row)
    rows = [
        (
            row.dim, f"{row.tile_m} x {row.tile_n}", row.warps, row.stages,
            f"{row.shared_bytes / 1024:.0f} KB", f"``{what}``" if what else "", row.why,
        )
        for (*_, what), row in seen.items()
    ]  # fmt: skip
    head = ("dims up to", "tile", "warps", "stages", "shared memory", "end of its name", "why")
    return table(head, rows)


class Barrier(NamedTuple):
    arrivals: str  # the expression that the kernel initialises it with
    values: list  # what that is for the variants


def initialised(stem):
    """Return {name: Barrier} of the mbarriers that a kernel initialises."""
    found = {}
    for match in INIT.finditer(text_of(stem)):
        if match[1] in found:
            raise LookupError(f"{stem} initialises {match[1]} twice")
        expression = " ".join(match[2].split())
        # Loop variables tell stages apart; an expression with one has no single value.
        by_stage = re.search(r"\bi\b", expression)
        values = [] if by_stage else values_of(stem, expression)
        found[match[1]] = Barrier(expression, values)
    if not found:
        raise LookupError(f"{stem} initialises no mbarrier")
    return found


def barriers(stem, content):
    """Return the table of mbarriers: arrivals from the source, roles from the page.

    An entry of `content` is ``name | who arrives | who waits | what a phase says``; entries are
    separated by empty lines.
    """
    made = initialised(stem)
    entries = re.split(r"\n\s*\n", "\n".join(content).strip())
    described = {}
    for entry in entries:
        name, *cells = " ".join(entry.split()).split(" | ")
        described[name] = cells
    if described.keys() != made.keys():
        raise LookupError(
            f"{stem} initialises {sorted(made)}, and the page describes {sorted(described)}"
        )
    rows = []
    for name, (arrives, waits, says) in described.items():
        expression, values = made[name]
        counts = "" if [expression] == list(map(str, values)) else f"``{expression}``"
        numbers = ", ".join(map(str, values))
        arrivals = f"{counts}: {numbers}" if counts and numbers else counts or numbers
        rows.append((f"``{name}``", arrivals, arrives, waits, says))
    return table(("mbarrier", "arrivals", "who arrives", "who waits", "what its phase says"), rows)


def registers(stem):
    """Return how a kernel shares out the registers of a multiprocessor, variant by variant."""
    names = [name for name in constants(stem) if re.fullmatch(r"k\w+Registers", name)]
    names = [name for name in names if re.search(rf"setmaxnreg_\w+<{name}>", text_of(stem))]
    if not names:
        raise LookupError(f"{stem} moves no registers")
    rows = set()
    for row in rows_of(stem):
        defines = dict(row.defines)
        counts = [evaluate(stem, expression_of(stem, name), defines) for name in names]
        first = REGISTERS // (row.threads * getattr(row, "blocks", 1)) // 8 * 8
        rows.add((row.threads, first, *counts))
    head = ("threads", "registers of each at the start", *(f"``{name}``" for name in names))
    return table(head, sorted(rows))


def code(stem, name):
    """Return the definition of a function, lambda or struct of a kernel or header, by its name."""
    text = text_of(stem)
    starts = re.compile(
        rf"^(?: *template <.*>\n)? *(?:(?:struct|enum)(?: alignas\(\d+\))? {name}\b"
        rf"|auto {name} = \[|[\w:<>&* ]+\b{name}\()",
        re.MULTILINE,
    )
    for match in starts.finditer(text):
        end = _definition_end(text, match.end())
        if end:
            return textwrap.dedent(text[match.start() : end])
    raise LookupError(f"{stem} has no definition of {name}")


def _definition_end(text, position):
    """Return where the braces after `position` close; None if a statement ends before they open."""
    line = text[text.rfind("\n", 0, position) + 1 : position]
    parentheses, braces = line.count("(") - line.count(")"), 0
    for i in range(position, len(text)):
        parentheses += (text[i] == "(") - (text[i] == ")")
        braces += (text[i] == "{") - (text[i] == "}")
        if braces == 0 and parentheses == 0 and text[i] == ";":
            return None
        if braces == 0 and text[i] == "}":
            return i + 1 + (text[i + 1 : i + 2] == ";")
    return None
