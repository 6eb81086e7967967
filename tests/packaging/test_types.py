"""Whatever a user imports says what it takes and gives; mypy, in `make lint`, checks that it is so."""

import inspect

import pytest
import torch
from tokenizers import Tokenizer
from typing_extensions import assert_type

from mor_kernels import decode, evaluate, model, ops, show, train


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
            public = method == "__init__" or not method.startswith("_")
            if public and inspect.isfunction(function) and function.__module__ != "typing":  # whence a Protocol's is
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
    assert "MoR.forward" in dict(functions(model)) and lacking(model.MoR.forward) == []
    assert "Pages.new" in dict(functions(ops)) and "Completion.__init__" in dict(functions(decode))


def for_mypy_alone(x: torch.Tensor, mor: model.MoR, tokenizer: Tokenizer) -> None:
    """Nobody calls this: results as a user's type checker sees them."""
    assert_type(ops.attention(x, x, x), torch.Tensor)
    assert_type(ops.attention(x, x, x, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(ops.rope(x, x), torch.Tensor)
    assert_type(ops.rope((x, x), x), tuple[torch.Tensor, torch.Tensor])
    assert_type(ops.decode_linear(x, x), torch.Tensor)
    assert_type(ops.route(x, x, 3).indices, torch.Tensor)
    assert_type(mor(x, x), model.MoROutput)
    assert_type(decode.Engine(mor, tokenizer=tokenizer).generate(["text"]), list[decode.Completion])
