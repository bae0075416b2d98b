"""What Python files define, as fingerprints that do not tell how or where it is written.

A definition is a top-level function, class, assignment or other statement. Its fingerprint leaves
out docstrings, annotations and imports; local variables are numbered, and what is imported has
its own name, however it was imported. Only the standard library is used, and the result does not
depend on the Python version.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Annotations that make a difference to a dataclass.
TELLING = {"ClassVar", "InitVar", "KW_ONLY"}


def module_name(path: str) -> str:
    """Return what a file is called in an import: 'fa_cupy/gpu/plan.py' is fa_cupy.gpu.plan."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_bare_string(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or a string that does nothing."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def says_nothing(node: ast.AST) -> bool:
    """Whether a statement has no part in a fingerprint."""
    if isinstance(node, ast.If) and not node.orelse:
        for_types = getattr(node.test, "attr", getattr(node.test, "id", "")) == "TYPE_CHECKING"
        return for_types and all(map(says_nothing, node.body))
    return isinstance(node, (ast.Import, ast.ImportFrom)) or is_bare_string(node)


def imports(nodes: Iterable[ast.AST], module: str, is_package: bool) -> dict[str, str]:
    """Return what the imports among these statements bind: the dotted path of each name."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or path] = path
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
            start = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                found[alias.asname or alias.name] = f"{start}.{alias.name}"
    return found


def own_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes that belong to a scope itself; of an inner scope its node alone.

    An assignment expression in a comprehension binds outside of it.
    """
    todo = list(nodes)[::-1]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, COMPREHENSIONS):
            todo += [n for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
        elif not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            todo += list(ast.iter_child_nodes(node))[::-1]


def bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that these nodes of one scope bind, imports left out."""
    names: set[str] = set()
    elsewhere: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            names |= {node.name} if node.name else set()
        elif isinstance(node, ast.MatchMapping):
            names |= {node.rest} if node.rest else set()
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere |= set(node.names)
    return names - elsewhere


class Module:
    """A file of the project."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.name = module_name(path)
        self.is_package = path.endswith("/__init__.py")
        self.body = tree.body
        self.imports = imports(own_nodes(tree.body), self.name, self.is_package)
        self.definitions: dict[str, list[ast.stmt]] = {}
        for statement in tree.body:
            for name in bound(own_nodes([statement])):
                self.definitions.setdefault(name, []).append(statement)


class Project:
    """The files that count, by the name of their module, and the modules that there are."""

    def __init__(self, trees: dict[str, ast.Module], others: Iterable[str] = ()) -> None:
        modules = [Module(path, tree) for path, tree in trees.items()]
        self.modules = {module.name: module for module in modules}
        self.names = {*self.modules, *map(module_name, others)}
        self.count = Counter(name for module in modules for name in module.definitions)
        self._marks: dict[tuple[str, str], str] = {}

    def reference(self, path: str, marked: bool) -> tuple[list[str], list[str]]:
        """Return what a dotted path leads to, and the attributes of it that follow."""
        parts = path.split(".")
        size = len(parts)
        while size and ".".join(parts[:size]) not in self.names:
            size -= 1
        if not size:
            return ["outside", path], []
        home, rest = ".".join(parts[:size]), parts[size:]
        module = self.modules.get(home)
        if module is None or not rest:
            return ["module", home, *rest[:1]], rest[1:]
        if rest[0] in module.definitions:
            mark = self.mark(home, rest[0]) if marked else ""
            return ["own", rest[0], *filter(None, [mark])], rest[1:]
        source = ".".join([module.imports.get(rest[0], home), *rest[1:]])
        if rest[0] in module.imports and source != path:
            return self.reference(source, marked)
        return ["module", home, rest[0]], rest[1:]

    def mark(self, home: str, name: str) -> str:
        """Tell definitions of one name in several modules from each other, by what they say."""
        if self.count[name] < 2:
            return ""
        if (home, name) not in self._marks:
            module = self.modules[home]
            prints = [fingerprint(self, module, s, False) for s in module.definitions[name]]
            self._marks[home, name] = "+".join(prints)
        return self._marks[home, name]


class Scope:
    """A function, a comprehension or a class: parameters, local names, imports."""

    def __init__(self, names: set[str], kept: set[str], imports: dict[str, str], is_class: bool):
        self.names, self.kept, self.imports, self.is_class = names, kept, imports, is_class
        self.numbers: dict[str, int] = {}


class Plain:
    """Turns a definition's syntax tree into lists and strings."""

    def __init__(self, project: Project, module: Module, node: ast.AST, marked: bool) -> None:
        self.project, self.module, self.marked = project, module, marked
        self.itself = bound(own_nodes([node]))
        self.scopes: list[Scope] = []
        self.numbers = itertools.count()
        self.by_name = any(map(_looks_at_names, ast.walk(node)))

    def __call__(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self(item) for item in node if self._counts(item)]
        if not isinstance(node, ast.AST):
            return None if node is None else f"{type(node).__name__} {node!a}"
        special = getattr(self, f"_{type(node).__name__}", None)
        return self._fields(node) if special is None else special(node)

    def _counts(self, node: Any) -> bool:
        """Whether an item of a list belongs to the fingerprint."""
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return self._in_class()  # a field of a dataclass; elsewhere an annotation alone
        return not says_nothing(node)

    def _in_class(self) -> bool:
        return bool(self.scopes) and self.scopes[-1].is_class

    def _fields(self, node: ast.AST, **replaced: Any) -> Any:
        # Fields that are empty come and go between versions.
        fields = [
            (name, replaced[name] if name in replaced else self(value))
            for name, value in ast.iter_fields(node)
        ]
        return [type(node).__name__, *(pair for pair in fields if pair[1] not in (None, []))]

    def _local(self, name: str) -> list[str]:
        """Return what a name in a scope means: a local, a parameter, a definition, a builtin."""
        for depth, scope in enumerate(reversed(self.scopes)):
            if scope.is_class and depth:
                continue
            if name in scope.kept or (scope.is_class and name in scope.names):
                return ["kept", name]
            if name in scope.imports:
                return ["path", scope.imports[name]]
            if name in scope.names:
                if self.by_name:
                    return ["local", name]
                if name not in scope.numbers:
                    scope.numbers[name] = next(self.numbers)
                return ["local", str(scope.numbers[name])]
        if name in self.module.definitions:
            return ["path", f"{self.module.name}.{name}"]
        if name in self.module.imports:
            return ["path", self.module.imports[name]]
        return ["builtin", name]

    def _binding(self, name: str | None) -> Any:
        """Return a name that a statement binds and holds as a string."""
        return None if name is None else (self._local(name) if self.scopes else name)

    def _chain(self, node: ast.expr, attributes: list[str]) -> Any:
        """Return a name with attributes; one that leads through modules by where it leads."""
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return self(node), attributes
        meaning = self._local(node.id)
        if meaning[0] != "path":
            return meaning, attributes
        path = ".".join([meaning[1], *attributes])
        # A definition that names itself is told from its namesakes by what it says.
        itself = meaning[1] in {f"{self.module.name}.{name}" for name in self.itself}
        return self.project.reference(path, self.marked and not itself)

    def _Name(self, node: ast.Name) -> Any:
        found, attributes = self._chain(node, [])
        return [found, *attributes, type(node.ctx).__name__]

    _Attribute = _Name

    def _Constant(self, node: ast.Constant) -> Any:
        return ["Constant", type(node.value).__name__, ascii(node.value)]

    def _JoinedStr(self, node: ast.JoinedStr) -> Any:
        """Join literal text into one piece however the parser cut it."""
        parts: list[Any] = ["JoinedStr"]
        for is_text, values in itertools.groupby(
            node.values, lambda value: isinstance(value, ast.Constant)
        ):
            if is_text:
                text = "".join(str(value.value) for value in values)  # type: ignore[attr-defined]
                parts += [ascii(text)] if text else []
            else:
                parts += map(self, values)
        return parts

    def _arg(self, node: ast.arg) -> Any:
        is_test = self.module.name.startswith("tests.")
        if not is_test or not all(scope.is_class for scope in self.scopes):
            return ["arg", node.arg]
        # The parameter may be a fixture that the module defines or imports.
        home = self.module.definitions.get(node.arg) and f"{self.module.name}.{node.arg}"
        path = home or self.module.imports.get(node.arg)
        found = self.project.reference(path, self.marked)[0] if path else []
        return ["arg", node.arg, *(found[2:] if found[:1] == ["own"] else [])]

    def _function(self, node: Any, **fields: Any) -> Any:
        """Return a function or a lambda: its defaults belong to the scope outside."""
        arguments = [n for n in ast.iter_child_nodes(node.args) if isinstance(n, ast.arg)]
        outside = {"args": self(node.args), **fields}
        body = node.body if isinstance(node.body, list) else [node.body]
        nodes = list(own_nodes(body))
        lazy = imports(nodes, self.module.name, self.module.is_package)
        self.scopes.append(Scope(bound(nodes), {a.arg for a in arguments}, lazy, False))
        inside = self(node.body)
        self.scopes.pop()
        return self._fields(node, body=inside, **outside)

    def _FunctionDef(self, node: Any) -> Any:
        name, decorators = self._binding(node.name), self(node.decorator_list)
        # Fields of its own: type parameters are there since 3.12, and say nothing here.
        return self._function(
            node, name=name, decorator_list=decorators, returns=None, type_params=None
        )

    _AsyncFunctionDef = _FunctionDef
    _Lambda = _function

    def _comprehension_of(self, node: Any) -> Any:
        nodes = [n for part in node.generators for n in own_nodes([part.target])]
        self.scopes.append(Scope(bound(nodes), set(), {}, False))
        found = self._fields(node)
        self.scopes.pop()
        return found

    _ListComp = _SetComp = _DictComp = _GeneratorExp = _comprehension_of

    def _ClassDef(self, node: ast.ClassDef) -> Any:
        outside = {
            "name": self._binding(node.name),
            "bases": self(node.bases),
            "keywords": self(node.keywords),
            "decorator_list": self(node.decorator_list),
        }
        nodes = list(own_nodes(node.body))
        lazy = imports(nodes, self.module.name, self.module.is_package)
        self.scopes.append(Scope(bound(nodes), set(), lazy, True))
        body = self(node.body)
        self.scopes.pop()
        return self._fields(node, body=body, type_params=None, **outside)

    def _AnnAssign(self, node: ast.AnnAssign) -> Any:
        if self._in_class():
            names = (getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node.annotation))
            return self._fields(node, annotation=sorted(TELLING & set(names)))
        return ["Assign", ("targets", [self(node.target)]), ("value", self(node.value))]

    def _ExceptHandler(self, node: Any) -> Any:
        return self._fields(node, name=self._binding(node.name))

    _MatchAs = _MatchStar = _ExceptHandler

    def _MatchMapping(self, node: ast.MatchMapping) -> Any:
        return self._fields(node, rest=self._binding(node.rest))

    def _Nonlocal(self, node: ast.Nonlocal) -> Any:
        return ["Nonlocal", *map(self._local, node.names)]


def _looks_at_names(node: ast.AST) -> bool:
    """Whether a call may read local variables by their names."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    reads = {"locals", "eval", "exec"} if node.args else {"locals", "vars", "dir"}
    return node.func.id in reads


def fingerprint(project: Project, module: Module, node: ast.stmt, marked: bool = True) -> str:
    """Hash what a top-level statement says."""
    plain = Plain(project, module, node, marked)(node)
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


def _label(node: ast.stmt) -> str:
    """Return what messages call a top-level statement."""
    names = sorted(bound(own_nodes([node])))
    return ", ".join(names) if names else f"{type(node).__name__} statement"


def fingerprints(root: Path, paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the fingerprint of each definition of these files, by path and by name."""
    others = {
        path.relative_to(root).as_posix()
        for folder in ("fa_cupy", "tests", "validation")
        for path in (root / folder).rglob("*.py")
    }
    trees = {path: ast.parse((root / path).read_bytes()) for path in sorted(paths)}
    project = Project(trees, others)
    found: dict[str, dict[str, str]] = {}
    for path in trees:
        module = project.modules[module_name(path)]
        prints = found[path] = {}
        seen: Counter[str] = Counter()
        for node in module.body:
            if says_nothing(node) or (isinstance(node, ast.AnnAssign) and node.value is None):
                continue
            label = _label(node)
            seen[label] += 1
            name = label if seen[label] == 1 else f"{label} ({seen[label]})"
            prints[name] = fingerprint(project, module, node)
    return found
