"""Storages and how operators see them: what a recording is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

BLOCK = 512
"""PyTorch's caching allocator and neap both round every tensor up to blocks of this many bytes."""

DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
SCALAR_TYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
}
"""The numbers by which operators take types."""
_BY_SIZE = {1: "u8", 2: "i16", 4: "i32", 8: "i64", 16: "c128"}


def dtype_name(dtype: torch.dtype) -> str:
    """The graph format's name of an element type; for a type that it lacks, an integer of that
    size.
    """
    return DTYPES.get(dtype) or _BY_SIZE[dtype.itemsize]


def blocks(size: int) -> int:
    """``size`` bytes rounded up to whole blocks."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""The classes of tensors that don't dispatch by themselves."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor, or nothing for sparse tensors and subclasses that have none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def start_of(tensor: torch.Tensor) -> int | None:
    """The address at which a tensor's storage begins; nothing for tensors that have none. Makes no
    object of Python's for the storage, which would live as long as that.
    """
    try:
        return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()
    except (NotImplementedError, RuntimeError):
        return None


def has_names(tensor: torch.Tensor) -> bool:
    """Whether its dimensions have names, which PyTorch has no more from 2.15 on."""
    ask: Any = getattr(tensor, "has_names", None)
    return ask is not None and bool(ask())


@dataclass(eq=False)
class Storage:
    """One storage with a life. Operators are counted from the start of the recording."""

    number: int
    bytes: int
    dtype: str
    shape: list[int]
    reference: Any
    """A ``StorageWeakRef``: says whether it lives, and keeps no memory."""
    name: str = ""
    role: str = "activation"
    born: int | None = None
    """The operator that made it, or nothing if it was there before."""
    seen: int = 0
    """The first operator before which it was seen."""
    died: int | None = None
    """The first operator at whose start it was gone."""
    uses: list[int] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    """What autograd saved of it for backward."""
    alone: int | None = None
    """The first operator at whose start nothing but autograd held it."""
    alone_from: int = 0
    """The first saved tensor of the iteration at which that was so, or the next to be saved."""
    persistent: bool = False
    """It was there before the recording and has a name."""

    def update_size(self, size: int) -> None:
        """Notes that it grew (``resize_``, ``out=``)."""
        self.bytes = max(self.bytes, size)


@dataclass(eq=False)
class Saved:
    """One tensor that autograd saved, in the order of saving.

    Attributes:
        place: how many were saved before it in the iteration.
        packed: the operator after which it was saved.
        order: how many askings of the iteration came before.
        asked: each time backward asked for it, in order: the operator before which it did, and how
            many askings of the iteration came before.
        view: dtype, shape, strides and offset as saved.
        node: the name of the function that made the saved tensor, empty for a leaf.
        module: the path of the module that ran.
    """

    place: int
    storage: Storage | None
    packed: int
    view: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
    node: str
    module: str
    iteration: int
    order: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    subclass: bool = False
    """It dispatches by itself."""
    recipe: tuple[str, list[Saved]] | None = None
    """How its storage can be made again: autograd's function, and what that saved of its inputs."""

    @property
    def first(self) -> tuple[int, int]:
        """The first of :attr:`asked`."""
        return self.asked[0]

    @property
    def last(self) -> int:
        """The operator before which backward asked for it last."""
        return self.asked[-1][0]


@dataclass(eq=False)
class Operand:
    """How an operator sees a storage."""

    storage: Storage
    dtype: str
    offset: int
    shape: list[int]
    stride: list[int]


@dataclass(eq=False)
class Op:
    """One operator at dispatch level.

    Attributes:
        args: constants, operands, lists of operands, and ``Host`` dictionaries, in schema order.
        outputs: an operand for each tensor it returned; nothing for views and tensors elsewhere.
        hidden: what it wrote besides.
        lists: for each list argument of tensors, the storages by place: what multi-tensor operators
            are split by.
        allocated: bytes that PyTorch's allocator had given out before and after, and the most
            within.
    """

    index: int
    kind: str
    phase: str
    module: str
    args: list[Any]
    outputs: list[Operand | None]
    hidden: list[Operand]
    reads: list[Storage]
    writes: list[Storage]
    makes: list[Storage]
    lists: list[list[Storage | None]]
    random: bool
    generator: bool
    """Whether these are drawn from a generator that is not PyTorch's own."""
    node: int | None
    iteration: int
    step: int | None
    """Which optimizer step it belongs to, counted over the recording."""
    allocated: tuple[int, int, int] | None = None
    name: str = ""
    workspace: int = 0
    custom: bool = False


class Storages:
    """All storages of a device that were seen, by address of their C++ object while they live."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.all: list[Storage] = []
        self._living: dict[int, Storage] = {}

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """The record of a tensor's storage, if it has been seen."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        found = self._living.get(storage._cdata)
        return found if found is not None and not found.reference.expired() else None

    def intern(self, tensor: torch.Tensor, now: int, born: int | None = None) -> Storage | None:
        """The record of a tensor's storage, made if need be. Nothing for no bytes and other
        devices.
        """
        if tensor.device.type != self.device:
            return None
        storage = storage_of(tensor)
        if storage is None or (size := storage.nbytes()) == 0:
            return None
        key = storage._cdata
        found = self._living.get(key)
        if found is not None and not found.reference.expired():
            found.update_size(size)
            return found
        whole = tensor.numel() * tensor.element_size() == size and tensor.is_contiguous()
        dense = tensor.numel() * tensor.element_size() <= size
        made = Storage(
            number=len(self.all),
            bytes=size,
            dtype=dtype_name(tensor.dtype) if dense else "u8",
            shape=list(tensor.shape) if whole or dense else [size],
            reference=StorageWeakRef(storage),
            born=born,
            seen=now,
        )
        self.all.append(made)
        self._living[key] = made
        return made

    def leave(self, storage: Storage) -> None:
        """Its bytes leave the device, and it lives on."""
        self._living = {key: one for key, one in self._living.items() if one is not storage}

    def come(self, storage: Storage, tensor: torch.Tensor) -> None:
        """Its bytes are those of this tensor from now on."""
        new = tensor.untyped_storage()
        storage.reference = StorageWeakRef(new)
        self._living[new._cdata] = storage

    def bury(self, now: int) -> None:
        """Notes which storages are gone at the start of operator ``now``."""
        # All are looked at before each operator, so without the layers of `StorageWeakRef.expired`.
        expired = torch.UntypedStorage._expired
        for key in [key for key, s in self._living.items() if expired(s.reference.cdata)]:
            self._living.pop(key).died = now


def has_generator(args: Any, kwargs: Any) -> bool:
    """Whether an operator's arguments name a generator of random numbers, not PyTorch's own."""
    return any(
        isinstance(one, torch.Generator) and one is not torch.default_generator
        for one in (*args, *kwargs.values())
    )
