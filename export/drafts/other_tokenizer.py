"""For a draft with another tokenizer: which of its tokens the target has too, and whether they are enough.

Tokens are the same if their bytes are (2502.05202, section 4): " the" is "\u0120the" in a byte-level vocabulary and
"\u2581the" in SentencePiece's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...errors import ExportError
from ..checkpoints.pairing import Ids, Match, Vocabulary
from .trimming import kept_mass

LEAST = 0.8  # of the draft's probability that must lie on tokens of both; below, most rounds would be wasted
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def is_foreign(target: Vocabulary, draft: Vocabulary) -> bool:
    """Whether both bring a tokenizer, and these cut text into different tokens."""
    if target.ids is None or draft.ids is None or target.tokenizer is None or draft.tokenizer is None:
        return False
    either = target.added | draft.added
    if any(i >= draft.logits for token, i in draft.ids.items() if token not in either):
        return False  # it could not read its own tokens
    return any(token not in either for token in target.ids.keys() ^ draft.ids.keys())


def match_bytes(target: Vocabulary, draft: Vocabulary) -> Match:
    """How the draft's ids stand to the target's: same bytes, same token; special tokens of the same name.

    Raises ExportError for a tokenizer whose tokens' bytes are not known.
    """
    assert target.ids is not None and draft.ids is not None
    ours, theirs = token_bytes(target), token_bytes(draft)
    outputs = np.full(draft.logits, -1, np.int64)
    for what, i in theirs.items():
        if i < draft.logits and ours.get(what, target.logits) < target.logits:
            outputs[i] = ours[what]
    shared = int((outputs >= 0).sum())
    if not shared:
        raise ExportError(f"draft '{draft.source}' and target '{target.source}' have not one token in common")
    note = (
        f"another tokenizer: {shared} of its {len(theirs)} tokens ({shared / len(theirs):.0%}) are among the target's"
        f" {len(ours)}"
    )
    return Match(outputs, None, target.logits, note, draft)


def require_coverage(source: str, logits: NDArray[np.float32], columns: Ids) -> None:
    """Raise ExportError if less than LEAST of the probability of the draft ``source`` lies on ``columns``, the tokens
    that its target has too; ``logits`` [..., V] are the draft's, in text that it wrote."""
    mass = kept_mass(logits, columns)
    if mass < LEAST:
        raise ExportError(
            f"draft '{source}' writes tokens that the target has with {int(100 * mass)}% of its probability, needed"
            f" are {LEAST:.0%}; choose a draft whose tokenizer is closer to the target's"
        )


def token_bytes(vocabulary: Vocabulary) -> dict[bytes | str, int]:
    """The id of each token by its bytes, special ones by name. Raises ExportError where markers are unknown."""
    assert vocabulary.ids is not None
    decode = _decoder(vocabulary)
    special = {t.content for t in vocabulary.tokenizer.get_added_tokens_decoder().values() if t.special}
    found: dict[bytes | str, int] = {}
    # a byte that is a token of its own is also a character: the character is what the tokenizer uses
    for token, i in sorted(vocabulary.ids.items(), key=lambda item: (not _BYTE.fullmatch(item[0]), item[1])):
        if token in special:
            found[token] = i
        elif (what := decode(token)) is not None:
            found[what] = i
        elif token in vocabulary.added:  # not spelt in bytes, and shown as it stands
            found[token.encode()] = i
    return found


def _decoder(vocabulary: Vocabulary) -> Callable[[str], bytes | None]:
    """token -> bytes, for the markers of this tokenizer."""
    settings = json.loads(vocabulary.tokenizer.to_str())
    decoder = json.dumps(settings.get("decoder") or {})
    if '"ByteLevel"' in decoder:
        return _byte_level
    if "\\u2581" in decoder:
        return _sentence_piece
    raise ExportError(
        f"'{vocabulary.source}': its tokenizer.json is neither byte-level nor SentencePiece, so the bytes of its tokens"
        " are not known; choose a draft of the same tokenizer"
    )


def _sentence_piece(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_level(token: str) -> bytes | None:
    """None for what no text is cut into."""
    return bytes(_ALPHABET[c] for c in token) if all(c in _ALPHABET for c in token) else None


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for characters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _alphabet()
