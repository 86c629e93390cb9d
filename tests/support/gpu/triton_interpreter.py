"""Run Triton kernels without a GPU, in Triton's interpreter on CPU tensors."""

# The interpreter has no public interface.
# ruff: noqa: SLF001

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch


def interpret_without_gpu() -> torch.device:
    """Return the device that tests of kernels run on. Call this before the kernels are imported."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    _speed_up()
    return torch.device("cpu")


class _Shape(NamedTuple):
    """The shape of a block and what the interpreter derives from it."""

    sizes: Any
    text: str
    numel: int
    sizes_of_tensor: Any
    numel_of_tensor: Any


@cache
def _speed_up() -> None:
    """Make the interpreter cache values that it would compute again in each operation, for most of its time."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang
    get_numpy_dtype: Callable[[Any], Any] = interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], _Shape] = {}

    @cache
    def languages_of(function: Any) -> list[Any]:
        found = function.__globals__.values()
        return [language for language in (tl, tl.core) if any(each is language for each in found)]

    def patch_once(function: Any) -> Any:
        """Patch the language at the launch of a kernel, but not in each call of a function that the kernel uses."""
        languages = languages_of(function)
        if languages and not any(tl.core.is_builtin(each.program_id) for each in languages):
            return interpreter._LangPatchScope()
        return patch_language(function)

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in dtypes:
            dtypes[name] = get_numpy_dtype(scalar)
        return dtypes[name]

    def describe(shape: Any) -> _Shape:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes not in shapes:
            numel = tl.core.validate_block_shape(sizes)
            of_tensor = tl.tuple([tl.constexpr(size) for size in sizes])
            known = tl.tuple(sizes)
            shapes[sizes] = _Shape(known, str(known), numel, of_tensor, tl.constexpr(numel))
        return shapes[sizes]

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, text, self.numel, *_ = describe(shape)
        if not self.shape:
            raise TypeError("a block has at least one dimension")
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        *_, self.shape, self.numel = describe(type.shape if type.is_block() else ())

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = numpy_dtype
    tl.block_type.__init__ = make_block_type
    tl.tensor.__init__ = make_tensor
