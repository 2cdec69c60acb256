"""Which models of a bundle TensorRT can read, by what ``leadout.json`` says of them."""

from __future__ import annotations

from ...bundle import ModelEntry
from ...errors import ExportError

PRECISIONS = ("fp32", "fp16", "bf16", "int4")  # of an engine


def require_buildable(entry: ModelEntry, precision: str) -> None:
    """Raise ExportError for a model of which no engine in ``precision`` (of PRECISIONS) can be built."""
    role = entry.directory
    if entry.dialect != "slots":
        raise ExportError(
            f"the {role} was imported ('{entry.dialect}'): engines are built from a checkpoint's own export:"
            " leadout export TARGET --draft DRAFT -o BUNDLE"
        )
    if entry.features is not None:
        raise ExportError(
            f"the {role} gives features, which engines do not: a head that reads them runs on ONNX Runtime alone;"
            " for TensorRT export the target with another draft"
        )
    if entry.recurrence is not None:
        raise ExportError(f"the {role} has recurrent layers, which ONNX Runtime alone computes (provider cpu)")
    if entry.precision not in ("fp32", "int4", "fp16"):
        raise ExportError(
            f"the {role} is in {entry.precision}, which only ONNX Runtime reads; export the pair in fp32"
            " (leadout export TARGET --draft DRAFT -o BUNDLE --precision fp32) and build that in int4"
        )
    if entry.precision == "fp16" and precision != "fp16":
        raise ExportError(
            f"the {role} is in fp16 and can be built in fp16 only; for {precision} export the pair in fp32:"
            " leadout export TARGET --draft DRAFT -o BUNDLE --precision fp32"
        )
