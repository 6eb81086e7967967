"""Whatever a user imports says what it takes and gives; mypy, in `make lint`, checks that it is so."""

import inspect

import pytest

from mor_kernels import decode, evaluate, model, ops, show, train
from mor_kernels.model.model import MoR


def functions(module):
    """Public functions, and methods of public classes, by name."""
    for name in getattr(module, "__all__", vars(module)):
        value = getattr(module, name)
        if name.startswith("_") or not getattr(value, "__module__", "").startswith("mor_kernels"):
            continue
        if not inspect.isclass(value):
            yield name, value
            continue
        for method, member in vars(value).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function) and (method == "__init__" or not method.startswith("_")):
                yield f"{name}.{method}", function


def lacking(function):
    """What has no type: names of parameters, or "return"; an ``__init__`` with arguments needs none, as to mypy."""
    signature = inspect.signature(function)
    types = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    if function.__name__ != "__init__":
        types["return"] = signature.return_annotation
    return [name for name, kind in types.items() if kind is inspect.Signature.empty and name not in ("self", "cls")]


@pytest.mark.parametrize("module", [ops, model, decode, train, evaluate, show], ids=lambda module: module.__name__)
def test_every_argument_and_result_of_the_public_interface_has_a_type(module):
    found = {name: lacking(function) for name, function in functions(module)}
    assert found and not {name: names for name, names in found.items() if names}


def test_what_has_no_type_is_found():
    def half(a: int, b, *args, c: int = 0, **rest: int):
        return a

    assert lacking(half) == ["b", "args", "return"]
    assert "MoR.forward" in dict(functions(model)) and lacking(MoR.forward) == []
    assert "Pages.new" in dict(functions(ops)) and "Completion.__init__" in dict(functions(decode))
