"""Arrays of other libraries, whose memory comes by DLPack."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradring
from support.pairs import Pair, on_threads

#: Types by their code in DLPack.
CODES = {"i": 0, "u": 1, "f": 2, "V": 4, "E": 4, "c": 5}


class Tensor(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Old:
    """Lends an array as libraries did before DLPack had versions; numpy lends no bfloat16.

    It has no deleter, because it keeps the memory itself. ``lies`` are fields that are not true.
    """

    def __init__(
        self, array: np.ndarray[Any, Any], *, device: int = 1, offset: int = 0, **lies: Any
    ) -> None:
        self.array = array
        self.device = device
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
        code, bits = CODES[array.dtype.kind], 8 * array.itemsize
        address = array.ctypes.data - offset if array.size else None
        self.tensor = Tensor(
            address, device, 0, array.ndim, code, bits, 1, shape, strides, offset, None, None
        )
        for field, lie in lies.items():
            setattr(self.tensor, field, lie)

    def __dlpack__(self) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


class New:
    """Lends an array with a version, as numpy does."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def _alone() -> gradring.Communicator:
    return gradring.Communicator(rank=0, world_size=1)


def _reduced(comm: gradring.Communicator) -> list[list[float]]:
    """Arrays of every kind of lender, in a list and alone, at once and later."""
    plain, old, new = (np.full((2, 3), comm.rank + number, np.float32) for number in range(3))
    bucket = [plain, Old(old, offset=64), New(new)]
    assert comm.all_reduce(bucket) is bucket
    narrow = np.full(5, 1.5 + comm.rank, ml_dtypes.bfloat16)
    comm.all_reduce_async(Old(narrow), "mean").wait()
    alone = np.full((), comm.rank, np.float64)
    comm.broadcast(New(alone), root=1)
    comm.all_reduce(Old(np.zeros((0, 4), np.int32)))
    return [x.astype(float).ravel().tolist() for x in (plain, old, new, narrow, alone)]


def test_lent_memory_is_reduced_in_place() -> None:
    for found in on_threads(2, _reduced):
        assert found == [[1.0] * 6, [3.0] * 6, [5.0] * 6, [2.0] * 5, [1.0]]


def _joined(comm: gradring.Communicator) -> list[Any]:
    """Also bfloat16, which numpy takes from nobody, and parts that are not contiguous."""
    rows = np.arange(12).reshape(4, 3).astype(ml_dtypes.bfloat16) * (comm.rank + 1)
    gathered = comm.all_gather(Old(rows[::2, 1:]))
    part = comm.reduce_scatter(Old(rows))
    assert {x.dtype for x in (gathered, part)} == {np.dtype(ml_dtypes.bfloat16)}
    wide = comm.all_gather(New(np.arange(6.0)[::-2] + comm.rank))
    assert wide.tolist() == [5.0, 3.0, 1.0, 6.0, 4.0, 2.0] and wide.dtype == np.float64
    assert (rows == np.arange(12).reshape(4, 3) * (comm.rank + 1)).all(), "it is not changed"
    empty = comm.all_gather(Old(np.zeros((0, 2), ml_dtypes.bfloat16)))
    return [gathered.astype(int).tolist(), part.astype(int).tolist(), empty.shape]


def test_lent_memory_is_gathered_and_scattered() -> None:
    for rank, found in enumerate(on_threads(2, _joined)):
        rows = (3 * np.arange(12).reshape(4, 3)).tolist()
        assert found[0] == [[1, 2], [7, 8], [2, 4], [14, 16]]
        assert found[1:] == [rows[2 * rank : 2 * rank + 2], (0, 2)]


def test_without_a_type_of_numpy_for_the_result_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Old(np.ones(3, ml_dtypes.bfloat16))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with _alone() as comm:
        for collective in (comm.all_gather, comm.reduce_scatter):
            with pytest.raises(TypeError, match="pip install ml_dtypes"):
                collective(narrow)


def _frozen() -> New:
    x = np.ones(3)
    x.flags.writeable = False
    return New(x)


def _shape(*dims: int) -> Any:
    return (ctypes.c_int64 * len(dims))(*dims)


class NoDevice:
    def __dlpack__(self) -> Any:
        return np.ones(3).__dlpack__()


class Stubborn(Old):
    """Does not lend, as a tensor of PyTorch that needs a gradient."""

    def __dlpack__(self) -> Any:
        raise BufferError("it needs a gradient")


class Copying(New):
    """Lends a copy, as an array that its library never lets anybody write to."""

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**{**options, "copy": True})


class Resolved(New):
    """A tensor of torch with nothing to resolve."""

    is_quantized = False

    def is_neg(self) -> bool:
        return False

    def is_conj(self) -> bool:
        return False


class Negated(Resolved):
    """One whose memory has the other sign, as that of ``x.conj().imag``."""

    def is_neg(self) -> bool:
        return True


class Conjugate(Resolved):
    """One whose memory is yet to be conjugated."""

    def is_conj(self) -> bool:
        return True


class Quantised(New):
    is_quantized = True


class Masked(np.ndarray[Any, Any]):
    """An array of astropy, which has a mask and is none of numpy.ma."""

    mask = np.array([True, False, False])


class Quantity(np.ndarray[Any, Any]):
    """One of astropy or unyt."""

    unit = "km"


class Delegating:
    """A quantity of pint, which passes on all that it is asked for."""

    units = "km"

    def __init__(self) -> None:
        self._magnitude = np.ones(3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_magnitude"], name)


class Lazy:
    """What evaluates itself only when it is asked, to an array with a mask."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.ma.array(np.ones(3), mask=[True, False, False])


#: What means more than its memory says, and what to do.
MEANINGS: list[tuple[Any, str]] = [
    (Negated(np.ones(3)), r"a Negated cannot travel: .* other sign; call resolve_neg\(\)"),
    (Conjugate(np.ones(3)), r"not conjugated; call resolve_conj\(\)"),
    (Quantised(np.ones(3, np.uint8)), r"its scale would be ignored; call dequantize\(\)"),
    (np.ones(3).view(Masked), r"its mask would be ignored; pass x.filled\(value\)"),
    (np.ones(3).view(Quantity), "its unit would be ignored; pass its numbers"),
    (Delegating(), "its unit would be ignored; pass its numbers"),
    (np.ma.ones(3), r"a MaskedArray cannot travel: its mask"),
]


@pytest.mark.parametrize(("x", "says"), MEANINGS, ids=lambda x: type(x).__name__)
def test_what_means_more_than_its_memory_says_is_refused(x: Any, says: str) -> None:
    with _alone() as comm:
        for collective in (comm.all_reduce, comm.all_reduce_async, comm.broadcast):
            for given in (x, [x], [np.ones(3), x]):
                with pytest.raises(TypeError, match=says):
                    collective(given)
        for other in (comm.all_gather, comm.reduce_scatter, comm.reduce, comm.all_to_all):
            for given in (x, [x, x], ([np.ones(3)], [x])):
                with pytest.raises(TypeError, match=says):
                    other(given)
        with pytest.raises(TypeError, match="its mask would be ignored"):
            comm.all_gather(Lazy())
        with pytest.raises(TypeError, match="its mask would be ignored"):
            comm.all_gather([1.0, np.ma.masked])


def test_rows_and_splits_may_be_lent() -> None:
    with _alone() as comm:
        received, splits = comm.all_to_all(New(np.ones((3, 2))), New(np.array([3])))
        assert received.tolist() == [[1.0] * 2] * 3
        assert splits.tolist() == [3]


def test_what_has_such_a_meaning_no_more_is_reduced() -> None:
    with _alone() as comm:
        lender = Resolved(np.ones(3))
        assert comm.all_reduce(lender) is lender
        assert comm.all_gather(lender).tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (_frozen(), ValueError, "read-only"),
        (Old(np.ones((4, 4)).T[:, :2]), ValueError, "not C-contiguous"),
        (Old(np.ones(4)[::-1]), ValueError, "not C-contiguous"),
        (Old(np.ones(3, np.int16)), TypeError, "arrays of int16 are not supported"),
        (Old(np.ones(3, np.complex64)), TypeError, "arrays of complex64 are not supported"),
        (Old(np.ones(3), device=2), TypeError, "not in the host's memory"),
        (Old(np.ones(3), device_type=2), TypeError, "not in the host's memory"),
        (NoDevice(), TypeError, "a NoDevice is not a writable buffer"),
        (Old(np.ones(3), data=None), ValueError, "cannot be memory"),
        (Old(np.ones(3), shape=None), ValueError, "cannot be memory"),
        (Old(np.ones(3), dimensions=-1), ValueError, "cannot be memory"),
        (Old(np.ones(3), shape=_shape(-3)), ValueError, "cannot be memory"),
        (Old(np.ones(3), shape=_shape(1 << 60)), ValueError, "cannot be memory"),
        (Old(np.ones((2, 2)), shape=_shape(1 << 33, 1 << 33)), ValueError, "cannot be memory"),
        (Copying(np.ones(3)), ValueError, "Copying.* lends a copy only"),
        (Stubborn(np.ones(3)), ValueError, "does not lend its memory.*needs a gradient"),
        (Old(np.frombuffer(bytearray(9), np.uint8)[1:].view(np.int64)), ValueError, "not aligned"),
        ([np.ones(3), Old(np.ones(3, np.int32))], TypeError, "same dtype"),
    ],
)
def test_what_cannot_be_reduced_is_refused(x: Any, error: type[Exception], says: str) -> None:
    with _alone() as comm:
        for collective in (comm.all_reduce, comm.all_reduce_async, comm.broadcast):
            with pytest.raises(error, match=says):
                collective(x)


def test_one_array_twice_is_refused() -> None:
    x = np.ones(3)
    with _alone() as comm, pytest.raises(ValueError, match="share memory"):
        comm.all_reduce([x, New(x)])


class OneCapsule(Old):
    """Lends by the same capsule again and again, and notes when the memory is given back."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.given_back = 0
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._delete)
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        super().__init__(array, deleter=deleter)
        self._capsule = super().__dlpack__()

    def _delete(self, _: int) -> None:
        self.given_back += 1

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule


def test_a_capsule_lends_once() -> None:
    lender, refused = OneCapsule(np.ones(3)), OneCapsule(np.ones((3, 3)).T)
    with _alone() as comm:
        comm.all_reduce(lender)
        assert lender.given_back == 1
        with pytest.raises(ValueError, match="has lent its memory before"):
            comm.all_reduce(lender)
        with pytest.raises(ValueError, match="not C-contiguous"):
            comm.all_reduce(refused)
        assert (lender.given_back, refused.given_back) == (1, 1)
    lender = OneCapsule(np.ones(3))
    with Pair() as pair:
        work = pair.comm.all_reduce_async(lender)
        with pytest.raises((BufferError, ValueError)):
            np.from_dlpack(lender)  # would give back what is written
        assert lender.given_back == 0
        pair.peer.all_reduce(np.ones(3))
        work.wait()
        pair.comm.stats()  # the interpreter gets back what a thread of the engine had
        assert lender.given_back == 1


def test_memory_is_given_back() -> None:
    x = np.ones(3)
    owner = weakref.ref(x)
    with _alone() as comm:
        lender = New(x)
        comm.all_reduce(lender)
        comm.all_reduce_async(lender).wait()
        comm.all_reduce(np.ones(1))  # the interpreter gets back what a thread of the engine had
        del x, lender
        gc.collect()
        assert owner() is None
