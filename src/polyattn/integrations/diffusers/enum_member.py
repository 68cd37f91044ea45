"""A member more in an enumeration of somebody else, and its removal.

diffusers names its backends by a closed ``str`` enumeration: a name that is no member is refused
before its dispatcher is asked. Members of enumerations are made when the class is; this makes one
as `enum` itself does (Python 3.11 to 3.13), and takes it away again without a trace.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

__all__ = ["add_member", "remove_member"]


def add_member(kind: type[Enum], name: str, value: str) -> Any:
    """Return the member of a ``str`` enumeration that has this name and value, made if need be.

    >>> class Color(str, Enum):
    ...     RED = "red"
    >>> blue = add_member(Color, "BLUE", "blue")
    >>> Color("blue") is blue, Color.BLUE is blue, len(Color), isinstance(blue, Color)
    (True, True, 2, True)
    >>> remove_member(Color, blue)
    >>> len(Color), hasattr(Color, "BLUE")
    (1, False)
    """
    tables = vars(kind)
    if value in tables["_value2member_map_"]:
        return tables["_value2member_map_"][value]
    made: Any = str.__new__
    member = made(kind, value)
    place = len(tables["_member_names_"])
    told = {"_name_": name, "_value_": value, "__objclass__": kind, "_sort_order_": place}
    for attribute, given in told.items():
        setattr(member, attribute, given)
    tables["_member_names_"].append(name)
    tables["_member_map_"][name] = member
    tables["_value2member_map_"][value] = member
    type.__setattr__(kind, name, member)  # past the class's own guard, which is for its users
    return member


def remove_member(kind: type[Enum], member: Any) -> None:
    """Take away a member that :func:`add_member` has made."""
    tables, name = vars(kind), member.name
    tables["_member_names_"].remove(name)
    del tables["_member_map_"][name]
    del tables["_value2member_map_"][member.value]
    type.__delattr__(kind, name)
