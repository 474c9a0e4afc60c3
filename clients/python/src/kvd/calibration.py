"""A calibration that the daemon makes from what a model holds there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .checks import check_text
from .errors import InvalidArgument, restarted
from .region import Region

if TYPE_CHECKING:
    from .model import Model
    from .sequence import Sequence

# Beside an artefact in a region.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class Calibrated:
    """What `Model.calibrate` answers."""

    # The artefact, for `calibration` of `Client.model`.
    calibration: bytes
    # Tokens that it was fitted on.
    tokens: int
    # Queries of the KV head that has the fewest; 0 where the model was not attended.
    queries_per_head: int


def calibrate(
    model: Model,
    sequences: Iterable[Sequence],
    codecs: Iterable[str],
    *,
    seed: int,
    tokens: int,
    timeout: float,
) -> Calibrated:
    """Asks by a connection of its own: an artefact is large, and a fit takes long."""
    from .client import Client  # noqa: PLC0415 (it imports models)

    each = list(sequences)
    if not each:
        raise InvalidArgument("no sequence to calibrate from")
    link = model.client.link()
    for index, sequence in enumerate(each):
        if not hasattr(sequence, "boot_id"):
            raise InvalidArgument(f"sequences[{index}] is {type(sequence).__name__}")
        if sequence.boot_id != link.boot_id:
            raise restarted(sequence.boot_id, link.boot_id)
    room = link.info().message_bytes_max + _SPARE_BYTES
    options = replace(
        model.client.options, timeout=timeout, region_bytes=room + _SPARE_BYTES, session=None
    )
    fields = {
        "model_id": model.id_at(link),
        "sequence_ids": [sequence.id for sequence in each],
        "codecs": [check_text("codecs", codec) for codec in codecs],
        "seed": seed,
        "tokens_max": tokens,
    }
    with Client(options) as client:
        own = client.link()
        with own.watched():
            if isinstance(own.payloads, Region):
                # In one go: asked again with more room the daemon would fit again.
                answer, _ = own.payloads.call_beside(
                    "CalibrateModel", 0, lambda _: fields, lambda _: None, room
                )
            else:
                answer = own.call("CalibrateModel", **fields)
    return Calibrated(answer.calibration, answer.tokens, answer.queries_per_head)
