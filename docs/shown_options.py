"""A griffe extension: signatures that `csd.engine.options.show.shows` makes at import.

Griffe reads the source, where the arguments are `**options`. The signature and the docstring of a
decorated function come from the imported one.
"""

import importlib
import inspect
import os
from typing import Any

import griffe

# kernels are imported where there is no GPU
os.environ.setdefault("TRITON_INTERPRET", "1")


class ShownOptions(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        decorators = obj.decorators if isinstance(obj, griffe.Function | griffe.Class) else ()
        if not any(str(d.value).startswith("shows(") for d in decorators):
            return
        func: Any = obj
        thing: Any = importlib.import_module(func.module.path)
        for name in func.path.removeprefix(func.module.path + ".").split("."):
            thing = getattr(thing, name)
        called, taken = func, thing
        if isinstance(obj, griffe.Class):
            called, taken = func["__init__"], thing.__init__
        called.parameters = griffe.Parameters(*map(_parameter, _signature(taken)))
        func.docstring = griffe.Docstring(inspect.getdoc(thing) or "", parent=func)


def _signature(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _parameter(p: inspect.Parameter) -> griffe.Parameter:
    kind = griffe.ParameterKind[p.kind.name.lower()]
    default = None if p.default is p.empty else repr(p.default)
    annotation = None if p.annotation is p.empty else inspect.formatannotation(p.annotation)
    return griffe.Parameter(p.name, annotation=annotation, kind=kind, default=default)
