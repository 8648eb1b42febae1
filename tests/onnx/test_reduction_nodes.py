"""Functions that reduce or sort, in ONNX Runtime against torch, for any number of samples."""

import pytest
import torch

from fxq.onnx.onnx_objects import NotInOnnx
from tests.onnx.test_function_nodes import X, Y, written
from tests.support.helpers import module
from tests.support.onnx_runs import normal, onnx, run_onnxruntime

pytestmark = pytest.mark.any_cpu

KEEPS = {
    "norms": lambda x, keep: (
        x.norm(dim=1, keepdim=keep),
        torch.norm(x, 1, -1, keep),
        x.norm(2, (0, 1), keepdim=keep),
        torch.linalg.norm(x, dim=0, keepdim=keep),
        torch.linalg.vector_norm(x, ord=1, dim=1, keepdim=keep),
    ),
    "variances": lambda x, keep: (
        x.var(1, keepdim=keep),
        torch.var(x, 0, False, keep),
        x.var((0, 1), correction=2, keepdim=keep),
        *torch.var_mean(x, 1, keepdim=keep),
    ),
    "deviations": lambda x, keep: (x.std(-1, keepdim=keep), *torch.std_mean(x, 0, unbiased=False, keepdim=keep)),
    "products": lambda x, keep: (x.prod(1, keep), x.logsumexp((0, 1), keepdim=keep)),
    "truths": lambda x, keep: ((x > 0).any(1, keep), (x > -1).all(0, keepdim=keep), x.any(1, keepdim=keep)),
}
OF_ALL = {
    "norms": lambda x: (x.norm(), torch.linalg.norm(x)),
    "variances": lambda x: (x.var(), x.std(False), torch.std_mean(x)[1]),
    "products": lambda x: x.prod() + 1,
    "truths": lambda x: ((x > 9).any(), (x > -9).all(), torch.count_nonzero(x), torch.count_nonzero(x > 0, 1)),
    "orders": lambda x: (*x.topk(2), x.sort()[0], x.sort(0, descending=True)[1], torch.argsort(x, 1)),
    "least": lambda x: torch.topk(x, 3, dim=1, largest=False)[0],
    "classes": lambda x: torch.nn.functional.one_hot(x.argmax(1), 4),
}


def same(model, x):
    gm, onnx_model = written(model, x)
    onnx.checker.check_model(onnx_model, full_check=True)
    for inputs in (x, normal(7, 4, seed=3), Y):
        wanted = gm(inputs)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for got, expected in zip(run_onnxruntime(onnx_model, [inputs]), wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", KEEPS)
def test_along_axes(name, keep):
    same(module(lambda self, x: KEEPS[name](x, keep)), X)


@pytest.mark.parametrize("name", OF_ALL)
def test_of_all(name):
    same(module(lambda self, x: OF_ALL[name](x)), X)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.norm(3, dim=1), "its order is 3, neither 1 nor 2"),
        (lambda x: x.norm(dim=1, dtype=torch.float64), "it changes the dtype"),
        (lambda x: torch.linalg.norm(x, 2), "it is a matrix norm of order 2"),
        (lambda x: (x > 0).prod(1), "its input is integer"),
        (lambda x: torch.nn.functional.one_hot(x.argmax(1)), "num_classes is not given"),
    ],
)
def test_refusals(function, reason):
    with pytest.raises(NotInOnnx, match=reason):
        written(module(lambda self, x: function(x)), X)
