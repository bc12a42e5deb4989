"""Records: classes with slots and named fields, built without generating code.

``dataclasses`` compiles five functions for each frozen class with slots, which costs more than a
millisecond a class and a hundred at every start. A record shares its functions with all others.
Type checkers read both alike. Fields are set once, by the constructor, unless the record is mutable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Callable

Class = TypeVar("Class")

_UNSET: Any = object()


class Field(NamedTuple):
    """One field.

    Attributes:
        name: Its name.
        default: Its default, if it has one.
        factory: Makes a default anew, None without.
        shown: Whether ``repr`` shows it.
        given: Whether the constructor takes it; others are set by ``__post_init__``.
        compared: Whether equality looks at it.
    """

    name: str
    default: Any = _UNSET
    factory: Callable[[], Any] | None = None
    shown: bool = True
    given: bool = True
    compared: bool = True


def field(
    *,
    default: Any = _UNSET,
    default_factory: Callable[[], Any] | None = None,
    repr: bool = True,  # noqa: A002  # the names that type checkers know
    init: bool = True,
    compare: bool = True,
) -> Any:
    """Declare a field that is not plain; the arguments are those of ``dataclasses.field``."""
    return Field("", default, default_factory, repr, init, compare)


def _init(self: Any, *values: Any, **named: Any) -> None:
    setters = type(self).__record_setters__
    taken = len(named)
    if len(values) > len(setters):
        raise TypeError(f"{type(self).__name__} takes {len(setters)} values, {len(values)} were given")
    for position, (record_field, put) in enumerate(setters):
        name, default, factory = record_field[:3]
        if position < len(values):
            put(self, values[position])
            if name in named:
                raise TypeError(f"{type(self).__name__} got {name} twice")
        elif name in named:
            put(self, named[name])
            taken -= 1
        elif factory is not None:
            put(self, factory())
        elif default is not _UNSET:
            put(self, default)
        else:
            raise TypeError(f"{type(self).__name__} needs {name}")
    if taken:
        unknown = named.keys() - {each.name for each, _ in setters}
        raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
    check = getattr(self, "__post_init__", None)
    if check is not None:
        check()


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, each.name) for each in type(self).__record_fields__ if each.compared)


def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in type(self).__record_fields__ if each.shown)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), _values(self)))


def _refuse_set(self: Any, name: str, _value: object = None) -> None:
    raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")


def _build(cls: type[Class], *, frozen: bool) -> type[Class]:
    namespace = dict(cls.__dict__)
    inherited: tuple[Field, ...] = getattr(cls, "__record_fields__", ())
    own: dict[str, Field] = {}
    for name, annotation in cls.__annotations__.items():
        if str(annotation).startswith("ClassVar"):
            continue
        declared = namespace.pop(name, _UNSET)
        own[name] = declared._replace(name=name) if isinstance(declared, Field) else Field(name, declared)
    for name in ("__dict__", "__weakref__"):
        namespace.pop(name, None)
    fields_of = (*(each for each in inherited if each.name not in own), *own.values())
    namespace |= {"__slots__": tuple(own), "__record_fields__": fields_of, "__init__": _init, "__hash__": None}
    namespace["__match_args__"] = tuple(each.name for each in fields_of if each.given)
    namespace.setdefault("__repr__", _repr)
    if "__eq__" not in cls.__dict__:
        namespace["__eq__"] = _eq
    if frozen:
        namespace |= {"__hash__": _hash, "__setattr__": _refuse_set, "__delattr__": _refuse_set}
    metaclass: Any = type(cls)
    built = metaclass(cls.__name__, cls.__bases__, namespace)
    built.__record_setters__ = tuple((each, getattr(built, each.name).__set__) for each in fields_of if each.given)
    built.__qualname__ = cls.__qualname__
    return built  # type: ignore[no-any-return]  # the same class with slots


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[Class]) -> type[Class]:
    """Make a class of annotated fields a record that cannot be changed; equal by its values."""
    return _build(cls, frozen=True)


@dataclass_transform(field_specifiers=(field,))
def mutable_record(cls: type[Class]) -> type[Class]:
    """Make a class of annotated fields a record whose fields may be set; equal by its values."""
    return _build(cls, frozen=False)


def fields(value: Any) -> tuple[Field, ...]:
    """The fields of a record or of its class."""
    found: tuple[Field, ...] = value.__record_fields__
    return found


def replace(value: Class, /, **changes: Any) -> Class:
    """A copy of a record with some fields changed."""
    given = (each.name for each in fields(value) if each.given)
    kept = {name: getattr(value, name) for name in given if name not in changes}
    return type(value)(**kept, **changes)


def as_dict(value: Any) -> dict[str, Any]:
    """The fields of a record by name; a field that is a record becomes a dictionary as well."""
    found = {each.name: getattr(value, each.name) for each in fields(value)}
    return {name: as_dict(inner) if hasattr(inner, "__record_fields__") else inner for name, inner in found.items()}
