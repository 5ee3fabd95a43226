"""Sections ``data`` and ``eval``: what is read, in which order, and what is held out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayformer.config.section import Count, CountOrZero, NotNegative, PathText, Positive, Section


class Source(Section):
    """One corpus."""

    path: PathText = Field(
        description="Prefix of a .bin/.idx pair, or python-stdlib: the Python standard library found on the machine."
    )
    weight: Positive = Field(1.0, description="Share of the samples drawn from this corpus, relative to the others.")


class DataConfig(Section):
    """The training corpus."""

    train: Annotated[tuple[Source, ...], Field(strict=False, min_length=1)] = Field(
        description="The corpora to train on."
    )
    tokenizer: str = Field("byte", description="Tokenizer of the corpus; byte has 256 bytes and an end of document.")
    order: Literal["keyed"] = Field("keyed", description="Order of the samples: a permutation keyed by seed and epoch.")
    split: Annotated[tuple[NotNegative, NotNegative, NotNegative], Field(strict=False)] = Field(
        (99.0, 1.0, 0.0), description="Shares of documents for training, held-out loss and test; not for python-stdlib."
    )
    ignore_ids: Annotated[tuple[CountOrZero, ...], Field(strict=False)] = Field(
        (), description="Token ids that the model sees but is not trained to predict, such as padding."
    )


class EvalConfig(Section):
    """Held-out loss."""

    every: CountOrZero = Field(0, description="Updates between two evaluations; 0 evaluates at the end only.")
    batches: Count = Field(8, description="Global batches of held-out samples in one evaluation.")
