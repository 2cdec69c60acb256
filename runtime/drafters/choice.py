"""Decides which drafter a draft model needs: by its tokenizer, and by what its graph reads and says."""

from __future__ import annotations

from ...engines.base import Engine
from ..steps import Stepper
from ..vocabulary import VocabularyMap
from .block_drafter import BlockDrafter
from .feature_drafter import FeatureDrafter
from .foreign_draft import ForeignDrafter
from .model_drafter import ModelDrafter
from .parallel_drafter import ParallelDrafter


def drafter_for(stepper: Stepper, vocabulary: VocabularyMap, target: Engine) -> ModelDrafter:
    """The drafter for the draft model of ``stepper``, whose ids ``vocabulary`` relates to those of ``target``."""
    if vocabulary.tokenizers is not None:
        return ForeignDrafter(stepper, vocabulary, vocabulary.tokenizers)
    spec = stepper.engine.spec
    if spec.reads_features:
        return (FeatureDrafter if spec.mask_token is None else BlockDrafter)(stepper, vocabulary, target)
    if spec.mask_token is not None:
        return ParallelDrafter(stepper, vocabulary)
    return ModelDrafter(stepper, vocabulary)
