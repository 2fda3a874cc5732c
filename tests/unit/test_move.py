"""Leaves that go by their own `.to`."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch

from prefetchpipe.batch.move import move

CPU = torch.device("cpu")
META = torch.device("meta")


class Marked(torch.Tensor):
    pass


class InPlace:
    """Moves by changing itself, as many batch classes do."""

    def __init__(self):
        self.x = torch.ones(2)
        self.table = {"y": torch.ones(2), "rows": [torch.ones(1)]}
        self.table["self"] = self.table

    def to(self, device):
        self.x = self.x.to(device)
        self.table["y"] = self.table["y"].to(device)
        self.table["rows"][0] = self.table["rows"][0].to(device)
        return self


def test_a_tensor_on_the_cpu_is_copied():
    tensor = torch.arange(6).reshape(2, 3).t()
    out = move(tensor, CPU)
    assert out.data_ptr() != tensor.data_ptr()
    assert out.stride() == tensor.stride()
    assert torch.equal(out, tensor)


def test_a_tensor_already_on_another_device_is_the_same_object():
    tensor = torch.ones(2, device="meta")
    assert move(tensor, META) is tensor
    assert move(torch.ones(2), META).device == META


def test_what_to_refuses_is_refused():
    with pytest.raises(NotImplementedError):
        move(torch.ones(2, device="meta"), CPU)


def test_gradients_flow_through():
    tensor = torch.ones(2, requires_grad=True)
    move(tensor, CPU).sum().backward()
    assert tensor.grad.tolist() == [1, 1]
    assert move(torch.ones(2, requires_grad=True), META).requires_grad


@pytest.mark.parametrize("device", [CPU, META])
def test_subclasses_keep_type_and_attributes(device):
    tensor = torch.ones(2).as_subclass(Marked)
    tensor.note = ["n"]
    out = move(tensor, device)
    assert type(out) is Marked
    assert out.note is tensor.note
    assert out.device == device
    assert out is not tensor
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "p"
    out = move(parameter, device)
    assert isinstance(out, torch.nn.Parameter)
    assert out.note == "p"
    assert out.requires_grad


def test_lazy_flags_are_kept():
    value = torch.tensor([1 + 2j, 3 - 1j])
    conj, neg = value.conj(), value.conj().imag
    assert conj.is_conj()
    assert neg.is_neg()
    for tensor in (conj, neg):
        out = move(tensor, CPU)
        assert (out.is_conj(), out.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert torch.equal(out, tensor)
        assert out.data_ptr() != tensor.data_ptr()


def test_exotic_tensors_are_copied():
    sparse = torch.eye(3).to_sparse()
    csr = torch.eye(3).to_sparse_csr()
    out = move(sparse, CPU)
    assert out.layout == torch.sparse_coo
    assert torch.equal(out.to_dense(), torch.eye(3))
    assert out._values().data_ptr() != sparse._values().data_ptr()
    assert move(csr, CPU).values().data_ptr() != csr.values().data_ptr()
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    out = move(jagged, CPU)
    assert type(out) is type(jagged)
    assert [t.tolist() for t in out.unbind()] == [[1], [1, 1]]
    assert out.values().data_ptr() != jagged.values().data_ptr()
    assert move(jagged, META).values().device == META
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        out = move(quantized, CPU)
        assert out.is_quantized
        assert out.dequantize().tolist() == quantized.dequantize().tolist()
    with torch.inference_mode():
        inference = torch.ones(2)
    assert move(inference, CPU).tolist() == [1, 1]


def test_uninitialized_parameters_go_by_to():
    lazy = torch.nn.UninitializedParameter()
    assert isinstance(move(lazy, CPU), torch.nn.UninitializedParameter)


def test_objects_that_move_in_place_leave_the_input_alone():
    source = InPlace()
    x, y, row = source.x, source.table["y"], source.table["rows"][0]
    out = move(source, META)
    assert type(out) is InPlace
    assert out is not source
    assert out.x.device == out.table["y"].device == out.table["rows"][0].device == META
    assert out.table["self"] is out.table
    assert source.x is x
    assert source.table["y"] is y
    assert source.table["rows"][0] is row


def test_on_the_cpu_an_object_owns_its_bytes():
    source = InPlace()
    out = move(source, CPU)
    source.x.zero_()
    source.table["y"].zero_()
    assert out.x.tolist() == [1, 1]
    assert out.table["y"].tolist() == [1, 1]


def test_objects_that_cannot_be_copied_deeply_are_copied_shallowly():
    source = InPlace()
    source.lock = threading.Lock()
    out = move(source, CPU)
    assert out is not source
    assert out.lock is source.lock
    assert out.x is source.x


def test_objects_that_cannot_be_copied_go_by_their_own_to():
    class Single:
        def __copy__(self):
            raise TypeError

        def __deepcopy__(self, memo):
            raise TypeError

        def to(self, device):
            return ("moved", device)

    assert move(Single(), META) == ("moved", META)
    assert move(Single(), CPU) == ("moved", CPU)


def test_to_without_a_result_means_the_changed_copy():
    class Silent:
        def to(self, device):
            self.device = device

    source = Silent()
    out = move(source, META)
    assert type(out) is Silent
    assert out.device == META
    assert not hasattr(source, "device")


def test_the_device_goes_by_position_and_errors_come_out():
    class Strict:
        def to(self, where, /):
            if not isinstance(where, torch.device):
                raise TypeError
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        move(Strict(), META)


def test_tensor_dict():
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"x": torch.ones(3)}, [3])
    out = move(batch, CPU)
    assert type(out) is type(batch)
    assert out["x"].data_ptr() != batch["x"].data_ptr()
    assert move(batch, META)["x"].device == META
    assert batch["x"].device == CPU

    @tensordict.tensorclass
    class Sample:
        x: torch.Tensor

    sample = Sample(x=torch.ones(3), batch_size=[3])
    out = move(sample, CPU)
    assert type(out) is Sample
    assert out.x.data_ptr() != sample.x.data_ptr()
    assert copy.copy(sample).x.device == CPU
