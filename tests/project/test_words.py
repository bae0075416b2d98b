"""Words that the project's texts do not use: those of an earlier vocabulary.

`docs/glossary.rst` has the terms that are used in their place.
"""

import ast
import io
import re
import tokenize

import pytest

from tests.project.test_readme import PAGES
from tests.project.test_style import HEADERS, KERNELS, MODULES, PTX
from validation.digest import ROOT

# In sentences, as patterns, each with what to write instead.
WORDS = {
    r"nobody|somebody": "name the thread, the caller or the user",
    r"told": "a parameter or an argument",
    r"spoiled": "nonfinite",
    r"redo(ne)?|rescored?|rework(ed)?": "nonfinite recompute",
    r"feeding (thread|warp|warpgroup)s?": "producer",
    r"computing (thread|warp|warpgroup)s?": "consumer",
    r"turned words|turned blocks": "transposed",
    r"single precision": "float32",
    r"beside": "next to, compared with, besides",
}
# ", of which" joins what are two sentences; "each of which" and its like are no such thing.
WORDS[r"(?<=, )of which"] = "a sentence of its own"

# Names in code, as patterns of whole words, each with the one that is used now.
NAMES = {
    r"bwd_rows\w*": "bwd_preprocess",
    r"bwd_round\w*": "bwd_convert_dq",
    r"bwd_redo\w*": "bwd_nonfinite",
    r"bwd_keys\w*": "bwd_dkdv",
    r"bwd_queries\w*": "bwd_dq",
    r"chunked_single\w*": "chunk_fp32",
    r"chunked_sm\d+": "chunk_sm80, chunk_sm90",
    r"states_(sm|single)\w+": "chunk_state",
    r"(Ring|Work|Q)Place": "PipelineState",
    r"take_turn|pass_turn|kTurn": "warp_scheduler_sync, warp_scheduler_arrive",
    r"draw_up|look_at|Announcement": "get_next_work, WorkTile",
    r"feed_(keys|queries|listed)": "load_kv, load_q",
    r"settle|rescore\w*|forget_not_finite": "softmax_step, recompute_row",
    r"rework_scores|bias_kind": "ScoreMod",
    r"row_major_words|kRowMajor|FA_ROW_MAJOR": "fragment order is the only one",
    r"debug_stage|kDebugStage": "the emulator",
}


def found(text, patterns):
    """Each old word with its line, and what to write."""
    flags = re.IGNORECASE if patterns is WORDS else 0
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match.group()}: {instead}"
        for pattern, instead in patterns.items()
        for match in re.finditer(rf"(?<![\w/])(?:{pattern})(?!\w)", text, flags)
    ]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


# What people read before they read code; of the host code of kernels, comments and docstrings.
HOST_CODE = [path for path in MODULES if "gpu" in path.relative_to(ROOT).parts]
SENTENCES = [
    *PAGES,
    *sorted((ROOT / "docs").glob("*.py")),
    *sorted((ROOT / "docs/gallery").glob("*.py")),
    *(path for path in MODULES if path not in HOST_CODE),
    *sorted((ROOT / "fa_cupy").glob("*.pyi")),
]


@pytest.mark.parametrize("path", SENTENCES, ids=name_of)
def test_sentences_use_the_words_of_the_glossary(path):
    assert not found(path.read_text(), WORDS)


def prose(text):
    """Comments and docstrings of a module, without the names in them."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    found = [docstring for node in nodes if (docstring := ast.get_docstring(node))]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return re.sub(r"`+[^`\n]*`+", "", "\n".join(found))


@pytest.mark.parametrize("path", HOST_CODE, ids=name_of)
def test_host_code_of_kernels_uses_the_words_of_the_glossary(path):
    assert not found(prose(path.read_text()), WORDS)


def test_prose_is_comments_and_docstrings():
    text = 'nobody = 1  # one\ndef f():\n    """Two `nobody`."""\n    return "told"\n'
    assert prose(text).split() == ["Two", ".", "#", "one"]


@pytest.mark.parametrize("folder", ["cuda_src", "fa_cupy", "ptx", "docs"])
def test_names_are_those_of_the_glossary(folder):
    paths = [p for p in KERNELS + HEADERS + PTX + MODULES + PAGES if name_of(p).startswith(folder)]
    assert len(paths) > 10
    assert not {name_of(p): old for p in paths if (old := found(p.read_text(), NAMES))}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Nobody waits.\nWhat is told of it", 2),
        ("three warps, of which one loads", 1),
        ("three warps, each of which loads; besides, it is bold", 0),
        ("see the page redo/undo, docs/redo", 1),
    ],
)
def test_old_words_are_found(text, count):
    assert len(found(text, WORDS)) == count


def test_old_names_are_found():
    assert found("x\ncall bwd_rows_sm90(RingPlace)", NAMES) == [
        "line 2: bwd_rows_sm90: bwd_preprocess", "line 2: RingPlace: PipelineState"
    ]  # fmt: skip
    assert not found("settles bwd_rowsum", {r"settle|bwd_rows": "?"})
