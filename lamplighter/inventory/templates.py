"""Templates in values: each is filled in when it is asked for, from the variables of its host, as Ansible does it.

Sandboxed Jinja. What is undefined is an error, and so is a template that needs itself. A lone ``{{ x }}`` keeps the
type of ``x``, all else is text, and what a template yields is not read as a template again. What came out of a vault,
or out of this machine's environment or files, taints every value that it took part in: no filter can launder a secret.

Reads files and the environment of this machine, where a ``lookup`` says so; starts nothing.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, Undefined, pass_context
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.nativetypes import NativeCodeGenerator
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import missing

from lamplighter.errors import InventoryError
from lamplighter.inventory import filters
from lamplighter.inventory.limits import MEBIBYTES, SECONDS, Limits, TooLongError
from lamplighter.inventory.scope import NO_TEMPLATE, Scope, is_open, is_template
from lamplighter.inventory.values import (
    OMIT,
    FilledSecret,
    Origin,
    Problems,
    Sealed,
    SecretMissing,
    SecretRef,
    Value,
)
from lamplighter.paths import at_home

_SCOPE = "\0scope"
_TOO_LARGE = f"the template needs more than {MEBIBYTES} MiB of memory: make it smaller"
_TOO_LONG = f"the template computed for {SECONDS:g} seconds without an end: shorten its loops or numbers"


class Taint(enum.IntEnum):
    """What took part in a value: nothing secret, this machine's environment or files, a vault."""

    NONE = 0
    LOCAL = 1
    VAULT = 2


class TemplateFault(Exception):
    """A template that cannot be filled in; the text quotes no value."""

    def __init__(self, message: str, *, is_undefined: bool = False) -> None:
        super().__init__(message)
        self.is_undefined = is_undefined


class _NotSet(str):
    """An environment variable that is not set: empty text that a default may replace, and nothing else may use."""

    __slots__ = ("name",)
    name: str

    def refuse(self, *_: object) -> NoReturn:
        raise SecretMissing(
            f"the environment variable {self.name} is not set", None, f"export {self.name} on this machine"
        )

    __str__ = __add__ = __radd__ = __format__ = __mod__ = refuse


class _Undefined(StrictUndefined):
    """Undefined, and so is all that would be in it: ``nope.a.b | default(1)`` is 1."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: object) -> _Undefined:  # type: ignore[override]
        return self


@dataclass(frozen=True)
class Filled:
    """What a template came to, and what took part in it; ``missing`` says which secret could not be had."""

    data: object
    taint: Taint
    missing: SecretMissing | None = None


class Templates:
    """The templates of one inventory.

    ``scope_of`` gives the scope of a host by name, ``open_sealed`` what is in a vault. ``directories`` are where
    ``lookup('file')`` looks for a relative path.
    """

    def __init__(
        self,
        scope_of: Callable[[str], Scope],
        hosts: Sequence[str],
        open_sealed: Callable[[Sealed], object],
        directories: Sequence[Path],
    ) -> None:
        self._scope_of = scope_of
        self._open_sealed = open_sealed
        self.directories = directories
        self._hosts = hosts
        self._environment = _environment(self)
        self._compiled: dict[str, Template] = {}
        self._filled: dict[tuple[str, tuple[str, ...]], Filled] = {}
        self._open: list[tuple[str, tuple[str, ...], Origin]] = []
        self._taints: list[Taint] = []
        self._limits = Limits()
        self._hopeless: dict[str, str] = {}
        """Templates that used up too much, by their text: what a group says is not tried for every host of it."""

    def fill(self, scope: Scope, path: tuple[str, ...], value: Value, problems: Problems) -> Value:
        """The value with everything in it filled in; what was omitted is gone, what failed is noted and null.

        A text that a secret took part in becomes a FilledSecret, which may stand only where secrets may.
        """
        if value.entries is not None:
            entries = {key: self.fill(scope, (*path, key), each, problems) for key, each in value.entries.items()}
            return replace(value, data={key: each for key, each in entries.items() if each.data is not OMIT})
        if isinstance(value.data, tuple):
            items = [self.fill(scope, (*path, str(place)), each, problems) for place, each in enumerate(value.data)]
            return replace(value, data=tuple(each for each in items if each.data is not OMIT))
        if not is_open(value):
            return value
        try:
            with self._limits.limited():
                return self._as_value(self._fill(scope, path, value), scope, path, value, problems)
        except (TemplateFault, MemoryError, TooLongError) as error:
            fault = error if isinstance(error, TemplateFault) else self._too_much(value, error)
            problems.add(value.origin, f"{'.'.join(path)}: {fault}")
            return replace(value, data=None)

    def _as_value(
        self, filled: Filled, scope: Scope, path: tuple[str, ...], source: Value, problems: Problems
    ) -> Value:
        if filled.missing is not None:
            return replace(source, data=FilledSecret(_reference(source), "", source.origin, filled.missing))
        if isinstance(filled.data, _Lazy):  # handed through whole: each part of it keeps its own taint
            found = self.fill(filled.data.scope, filled.data.path, filled.data.value, problems)
            return replace(found, origin=source.origin)
        if isinstance(filled.data, Undefined):
            problems.add(source.origin, f"{'.'.join(path)}: {_undefined(filled.data)}{NO_TEMPLATE}")
            return replace(source, data=None)
        try:
            return _value(filters.realized(filled.data), source, filled.taint)
        except TypeError as error:
            raise TemplateFault(str(error)) from None
        except UndefinedError as error:
            raise TemplateFault(f"{error.message}{NO_TEMPLATE}") from None
        except SecretMissing as lacking:
            return replace(source, data=FilledSecret(_reference(source), "", source.origin, lacking))
        except RecursionError:
            raise TemplateFault("the template comes to something that holds itself") from None
        except (MemoryError, TooLongError) as error:
            raise self._too_much(source, error) from None

    # -- what templates ask for

    def named(self, scope: Scope, name: str) -> object:
        """What a name stands for in this scope; ``missing`` where it stands for nothing."""
        if name == "omit":
            return OMIT
        if name == "hostvars":
            return _HostVariables(self, self._hosts)
        if name in scope.magic:
            return scope.magic[name]
        if name in scope.variables:
            return self.fetch(scope, (name,), scope.variables[name])
        return missing

    def host(self, name: str) -> _Variables:
        """The variables of another host."""
        return _Variables(self, self._scope_of(name))

    def fetch(self, scope: Scope, path: tuple[str, ...], value: Value) -> object:
        """A variable as templates see it: filled in, but for the parts of a mapping, which wait to be asked for."""
        if value.entries is not None:
            return _Lazy(self, scope, path, value)
        if isinstance(value.data, tuple):
            return [self.fetch(scope, (*path, str(place)), each) for place, each in enumerate(value.data)]
        if isinstance(value.data, SecretRef):
            self.taint(Taint.LOCAL)
            try:
                return value.data.resolve()
            except InventoryError as error:
                raise SecretMissing(error.what, value.origin, error.next_step) from None
        if not is_open(value):
            return value.data
        try:
            filled = self._fill(scope, path, value)
        except TemplateFault as fault:
            if not fault.is_undefined:
                raise TemplateFault(f"{'.'.join(path)} ({value.origin}): {fault}") from None
            return _Undefined(f"{'.'.join(path)} ({value.origin}) needs it: {fault}")
        self.taint(filled.taint)
        if filled.missing is not None:
            raise filled.missing
        return filled.data

    def taint(self, taint: Taint) -> None:
        """Remember that this took part in what is being filled in."""
        if self._taints:
            self._taints[-1] = max(self._taints[-1], taint)

    # -- filling in

    def _fill(self, scope: Scope, path: tuple[str, ...], value: Value) -> Filled:
        key = (scope.host, path)
        if key not in self._filled:
            self._filled[key] = self._fill_now(scope, path, value)
        return self._filled[key]

    def _fill_now(self, scope: Scope, path: tuple[str, ...], value: Value) -> Filled:
        trail = [each[:2] for each in self._open]
        if (scope.host, path) in trail:
            circle = [*self._open[trail.index((scope.host, path)) :], (scope.host, path, value.origin)]
            raise TemplateFault(
                "templates in a circle: " + " > ".join(f"{'.'.join(names)} ({where})" for _, names, where in circle)
            )
        with self._filling(scope, path, value.origin) as frame:
            try:
                data = self._content(scope, value)
                if isinstance(data, Undefined):
                    str(data)  # says what is undefined
            except SecretMissing as lacking:
                return Filled(None, max(self._taints[frame], Taint.LOCAL), lacking)
            except UndefinedError as error:
                raise TemplateFault(f"{error.message}{NO_TEMPLATE}", is_undefined=True) from None
            except TemplateSyntaxError as error:
                raise TemplateFault(f"no template: {error.message}{NO_TEMPLATE}") from None
            except RecursionError:
                raise TemplateFault("templates stand in each other too deeply") from None
            except (MemoryError, TooLongError) as error:
                raise self._too_much(value, error) from None
            except SecurityError as error:
                raise TemplateFault(f"not allowed in a template: {error.message}") from None
            except (
                TemplateError,
                ArithmeticError,
                LookupError,
                TypeError,
                ValueError,
                OSError,
                AttributeError,
            ) as error:
                # The words of a library may quote a value, and that may be a secret.
                quoted = f": {error}" if self._taints[frame] is Taint.NONE else ""
                raise TemplateFault(f"the template failed ({type(error).__name__}{quoted})") from None
            return Filled(data, self._taints[frame])

    def _too_much(self, source: Value, error: BaseException) -> TemplateFault:
        message = _TOO_LONG if isinstance(error, TooLongError) else _TOO_LARGE
        if isinstance(source.data, str):
            self._hopeless[source.data] = message
        return TemplateFault(message)

    @contextlib.contextmanager
    def _filling(self, scope: Scope, path: tuple[str, ...], origin: Origin) -> Iterator[int]:
        self._open.append((scope.host, path, origin))
        self._taints.append(Taint.NONE)
        try:
            yield len(self._taints) - 1
        finally:
            self._open.pop()
            self._taints.pop()

    def _content(self, scope: Scope, value: Value) -> object:
        data = value.data
        if value.sealed:
            self.taint(Taint.VAULT)
        if isinstance(data, Sealed):
            self.taint(Taint.VAULT)
            with self._limits.lifted():
                return self._open_sealed(data)  # which is no template, however it looks
        if not isinstance(data, str) or value.is_text or not is_template(data):
            return data
        if data in self._hopeless:
            raise TemplateFault(self._hopeless[data])
        if data not in self._compiled:
            self._compiled[data] = self._environment.from_string(data)
        template = self._compiled[data]
        context = template.new_context({_SCOPE: scope})
        return _concatenated(template.root_render_func(context))


def _reference(source: Value) -> str:
    """How a secret is shown: the template or the vault that it comes from."""
    if source.sealed:
        return source.sealed
    return str(source.data)


def _value(data: object, source: Value, taint: Taint) -> Value:
    """What a template came to as a value, at the place of the template. Raises TypeError for what cannot be one."""
    if isinstance(data, dict):
        return Value({_key(key): _value(each, source, taint) for key, each in data.items()}, source.origin)
    if isinstance(data, list):
        return Value(tuple(_value(each, source, taint) for each in data), source.origin)
    if isinstance(data, Undefined):
        raise TypeError(_undefined(data))
    if data is OMIT or data is None:
        return Value(OMIT if data is OMIT else None, source.origin)
    if isinstance(data, _NotSet):
        return _value_of_nothing(data, source)
    if not isinstance(data, str | int | float):
        raise TypeError(f"the template comes to a {type(data).__name__}, which no setting can be")
    text = {True: "true", False: "false"}[data] if isinstance(data, bool) else str.__str__(str(data))
    if isinstance(data, str):
        data = text
        if "\0" in text or any("\ud800" <= each <= "\udfff" for each in text):
            raise TypeError("the template comes to text with a NUL byte, or with half a surrogate pair")
    if taint is Taint.NONE:
        return Value(data, source.origin, text)
    secret = FilledSecret(_reference(source), text, source.origin, is_vaulted=taint is Taint.VAULT, data=data)
    return Value(secret, source.origin, text)


def _value_of_nothing(data: _NotSet, source: Value) -> Value:
    try:
        data.refuse()
    except SecretMissing as lacking:
        return Value(FilledSecret(_reference(source), "", source.origin, lacking), source.origin)


def _key(key: object) -> str:
    return key if isinstance(key, str) else str(key)


def _undefined(value: Undefined) -> str:
    try:
        str(value)
    except UndefinedError as error:
        return str(error.message)
    return "is undefined"


def _concatenated(chunks: Iterable[object]) -> object:
    """A single piece as it is, several as one text; nothing is "" in text, and so is an ``if`` without its ``else``."""
    pieces = list(chunks)
    if len(pieces) == 1:
        return pieces[0]
    return "".join(_text(piece) for piece in pieces) if pieces else None


def _text(piece: object) -> str:
    if piece is None or (isinstance(piece, Undefined) and "inline if-expression" in (piece._undefined_hint or "")):
        return ""
    if piece is OMIT:
        raise TypeError("omit cannot be a part of a text")
    return str(piece)


# -- lazy views


class _Lazy(Mapping[str, Any]):
    """A mapping of the inventory whose parts are filled in one by one, as they are asked for."""

    def __init__(self, templates: Templates, scope: Scope, path: tuple[str, ...], value: Value) -> None:
        self.templates, self.scope, self.path, self.value = templates, scope, path, value

    def __getitem__(self, key: str) -> object:
        return self.templates.fetch(self.scope, (*self.path, key), (self.value.entries or {})[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.value.entries or {})

    def __len__(self) -> int:
        return len(self.value.entries or {})

    def __str__(self) -> str:
        return str(filters.realized(self))


class _Variables(Mapping[str, Any]):
    """All that a host has a name for."""

    def __init__(self, templates: Templates, scope: Scope) -> None:
        self.templates, self.scope = templates, scope

    def __getitem__(self, key: str) -> object:
        found = self.templates.named(self.scope, key)
        if found is missing:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter({**self.scope.variables, **self.scope.magic})

    def __len__(self) -> int:
        return len({**self.scope.variables, **self.scope.magic})


class _HostVariables(Mapping[str, Any]):
    def __init__(self, templates: Templates, hosts: Sequence[str]) -> None:
        self.templates, self.hosts = templates, hosts

    def __getitem__(self, key: str) -> _Variables:
        if key not in self.hosts:
            raise KeyError(key)
        return self.templates.host(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)


# -- Jinja


class _ScopedContext(Context):
    def resolve_or_missing(self, key: str) -> Any:
        if key in self.vars:
            return self.vars[key]
        environment = self.environment
        assert isinstance(environment, _Sandbox)
        found = environment.inventory.named(self.parent[_SCOPE], key)
        return found if found is not missing else self.parent.get(key, missing)


class _Sandbox(SandboxedEnvironment):
    code_generator_class = NativeCodeGenerator
    context_class = _ScopedContext
    concat = staticmethod(_concatenated)  # type: ignore[assignment]
    inventory: Templates

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Keys of a mapping before its methods that nobody means: ``server.path`` of ours is the inventory's."""
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment(templates: Templates) -> _Sandbox:
    environment = _Sandbox(undefined=_Undefined, finalize=_as_it_is, autoescape=False)
    environment.inventory = templates
    for name in ("random", "pprint", "xmlattr", "urlize", "forceescape"):
        environment.filters.pop(name, None)
    for name in ("none", "true", "false", "boolean", "integer", "float", "string", "number", "mapping", "sameas"):
        own: Any = environment.tests[name]
        environment.tests[name] = _guarded(own, name)  # Jinja's own take what is undefined for an answer
    for kind, known in ((environment.filters, filters.FILTERS), (environment.tests, filters.TESTS)):
        kind.update({name: _guarded(each, name) for name, each in known.items()})
        kind.update({f"ansible.builtin.{name}": each for name, each in list(kind.items()) if "." not in name})
    environment.filters["tojson"] = environment.filters["to_json"]
    environment.globals.pop("lipsum", None)
    lookups = _Lookups(templates)
    environment.globals.update(lookup=lookups.lookup, query=lookups.query, q=lookups.query, undef=_undef)
    return environment


@pass_context
def _as_it_is(_: Context, value: object) -> object:
    """As it is; that it asks for the context keeps Jinja from turning constants into text while it compiles."""
    return value


def _undef(hint: str | None = None) -> Undefined:
    return _Undefined(hint or "undef() was called")


def _guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The filter, which meets plain values alone: what is undefined or not set ends the template before."""

    @wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        if name not in filters.FORGIVING:
            for each in (*values, *options.values()):
                if isinstance(each, _NotSet | Undefined):
                    str(each)
        if name in filters.LAZY:
            return function(*values, **options)
        return function(*(_plain(each) for each in values), **{key: _plain(each) for key, each in options.items()})

    return call


def _plain(value: Any) -> Any:
    return filters.realized(value) if isinstance(value, Mapping | list | tuple | Iterator) else value


class _Lookups:
    """``lookup`` and ``query``: the environment and the files of this machine, and variables by name."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._known = {"env": self._env, "file": self._file, "vars": self._vars}

    @pass_context
    def lookup(self, context: Context, name: str, *terms: Any, **options: Any) -> Any:
        """One value, or several texts joined by commas; a list with ``wantlist=True``."""
        wants_list = options.pop("wantlist", False)
        found = self._found(context, name, terms, options)
        if wants_list:
            return found
        return found[0] if len(found) == 1 else ",".join(str.__str__(str.__add__("", each)) for each in found)

    @pass_context
    def query(self, context: Context, name: str, *terms: Any, **options: Any) -> list[Any]:
        """The values as a list."""
        options.pop("wantlist", None)
        return self._found(context, name, terms, options)

    def _found(self, context: Context, name: str, terms: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        for each in (name, *terms):
            if isinstance(each, Undefined):
                str(each)
        short = str(name).removeprefix("ansible.builtin.")
        if short not in self._known:
            raise TemplateFault(
                f"lookup('{name}') is not read here, only {', '.join(sorted(self._known))}: "
                "put the value into a variable"
            )
        errors = options.pop("errors", "strict")
        flat = [each for term in terms for each in (term if isinstance(term, list | tuple) else [term])]
        found = []
        for term in flat:
            try:
                found.append(self._known[short](context.parent[_SCOPE], str(term), options))
            except SecretMissing:
                if errors not in ("ignore", "warn"):
                    raise
        return found if found or errors == "strict" else [""]

    def _env(self, _: Scope, name: str, options: Mapping[str, Any]) -> object:
        self._templates.taint(Taint.LOCAL)
        if name in os.environ:
            return os.environ[name]
        if "default" in options:
            return options["default"]
        absent = _NotSet("")
        absent.name = name
        return absent

    def _file(self, _: Scope, name: str, options: Mapping[str, Any]) -> object:
        self._templates.taint(Taint.LOCAL)
        wanted = Path(at_home(name))
        places = [wanted] if wanted.is_absolute() else [each / wanted for each in self._templates.directories]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            tried = ", ".join(map(str, places))
            raise SecretMissing(f"lookup('file', '{name}') finds no such file", None, f"looked for {tried}")
        try:
            text = found.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise SecretMissing(f"lookup('file', '{name}') cannot read {found}: {reason}", None) from None
        text = text.rstrip() if options.get("rstrip", True) else text
        return text.lstrip() if options.get("lstrip", False) else text

    def _vars(self, scope: Scope, name: str, options: Mapping[str, Any]) -> object:
        found = self._templates.named(scope, name)
        if found is not missing:
            return found
        return options["default"] if "default" in options else _Undefined(name=name)
