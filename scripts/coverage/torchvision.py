"""Importing torchvision beside a CPU build of torch."""

from __future__ import annotations

from importlib import import_module

import torch

_BOX = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_POOL = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_POOL_GRAD = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_DEFORM = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask"
)
_DEFORMED = "Tensor weight, Tensor offset, Tensor mask, Tensor bias"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOL_GRAD}, {_BOX}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_POOL}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOL_GRAD}, {_BOX}) -> Tensor",
    f"ps_roi_align({_POOL}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL_GRAD}, int sampling_ratio, "
    f"{_BOX}) -> Tensor",
    f"ps_roi_pool({_POOL}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL_GRAD}, {_BOX}) -> Tensor",
    f"deform_conv2d(Tensor input, {_DEFORMED}, {_DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, Tensor input, {_DEFORMED}, {_DEFORM}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_declared: list[torch.library.Library] = []  # what a library declares is gone when it is


def import_torchvision() -> None:
    """Import torchvision, with the operators that it needs to be imported declared where they do not load.

    The wheel on the package index is built for CUDA: beside a CPU build of torch its C++ operators do not load, and
    `import torchvision` then fails at the first registration for one of them. The classification and segmentation
    networks run none of them, so that declaring them is enough; calling one raises an error.

    Raises:
        ImportError: torchvision is not installed, or fails to import for another reason.
    """
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise ImportError(f"torchvision does not load: {error}") from error
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        _declared.append(library)
        import_module("torchvision")
