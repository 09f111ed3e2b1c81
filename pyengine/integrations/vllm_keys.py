"""Translates vLLM's block keys to namespaces and token ids, and our events to vLLM's.

vLLM hashes extra keys with the tokens of a block: the adapter's name, the salt, the identifiers of
images. Here adapter and salt are the namespace, and every position of an image gets a pseudo token
id above all real ones. So blocks are equal only if all their keys are, independent of hashes.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pyengine.kv_cache import Cleared, Lost, Removed, Stored

FIRST_PSEUDO_TOKEN = 1 << 31
FULL_ATTENTION = "full_attention"
LONGEST_NAMESPACE = 4096  # bytes; a longer one is replaced by its digest


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A position of an image: the image, its start relative to the position's block (negative if
    it starts earlier), and vLLM's token id at the position."""

    identifier: str
    offset: int
    token: int


TEXT = ""  # the identifier of negative token ids outside of images


def namespace_of(request: Any) -> bytes:
    """The namespace of a request: the adapter's name and the salt."""
    adapter = request.lora_request.lora_name if request.lora_request else None
    if adapter is None and request.cache_salt is None:
        return b""
    name = json.dumps([adapter, request.cache_salt]).encode()
    if len(name) <= LONGEST_NAMESPACE:
        return name
    digest = hashlib.sha256(name).hexdigest()
    return json.dumps([adapter and adapter[:256], f"sha256:{digest}"]).encode()


class PseudoTokens:
    """Assigns token ids to positions of images: equal ids for equal positions of equal images."""

    def __init__(self, block_size: int, limit: int = 1 << 20) -> None:
        self._block_size = block_size
        self.limit = limit
        self._numbers: dict[Placeholder, int] = {}
        self._placeholders: list[Placeholder] = []

    def __len__(self) -> int:
        return len(self._placeholders)

    def clear(self) -> None:
        """Forget all ids. Allowed only if no block is cached."""
        self._numbers.clear()
        self._placeholders.clear()

    def tokens(self, request: Any, start: int, end: int) -> list[int]:
        """The request's tokens from `start` to `end`, with pseudo tokens for images.

        Raises `OverflowError` if all ids are used.
        """
        tokens: list[int] = [
            token if token >= 0 else self._number(Placeholder(TEXT, 0, token))
            for token in request._all_token_ids[start:end]
        ]
        for feature in request.mm_features:
            offset, length = feature.mm_position.offset, feature.mm_position.length
            for at in range(max(offset, start), min(offset + length, end)):
                begin = offset - at // self._block_size * self._block_size
                token = request._all_token_ids[at]
                placeholder = Placeholder(feature.identifier, begin, token)
                tokens[at - start] = self._number(placeholder)
        return tokens

    def _number(self, placeholder: Placeholder) -> int:
        number = self._numbers.get(placeholder)
        if number is None:
            if len(self._placeholders) == self.limit:
                raise OverflowError(f"all {self.limit} ids for positions of images are used")
            number = FIRST_PSEUDO_TOKEN + len(self._placeholders)
            self._placeholders.append(placeholder)
            self._numbers[placeholder] = number
        return number

    def placeholder(self, token: int) -> Placeholder | None:
        """The position of a pseudo token; None for a real token."""
        return (
            self._placeholders[token - FIRST_PSEUDO_TOKEN] if token >= FIRST_PSEUDO_TOKEN else None
        )


class EventWriter:
    """Converts our events to vLLM's. Consecutive blocks of a prompt become one event."""

    def __init__(
        self, classes: Any, block_size: int, images: PseudoTokens, adapter_ids: dict[str, int]
    ) -> None:
        self._classes = classes
        self._block_size = block_size
        self._images = images
        self._adapter_ids = adapter_ids
        self._written: list[Any] = []

    def collect(
        self, events: list[Stored | Removed | Cleared | Lost], session: str | None = None
    ) -> None:
        """Add events that a request of this session caused.

        After `Lost`, the next events state all cached blocks.
        """
        written = self._written
        last: bytes | None = None  # the last block of the event before, if that may be extended
        space = b""
        for event in events:
            match event:
                case Stored():
                    if last is not None and event.parent == last and event.namespace == space:
                        self._append(written[-1], event)
                    else:
                        written.append(self._begin(event, session))
                    last, space = event.hash, event.namespace
                case Removed():
                    removed = self._classes.BlockRemoved
                    written.append(removed(block_hashes=[event.hash], medium="GPU", group_idx=0))
                    last = None
                case Cleared():
                    written.append(self._classes.AllBlocksCleared())
                    last = None

    def take(self) -> list[Any]:
        """Events added since the last call, in vLLM's classes, in order."""
        events, self._written = self._written, []
        return events

    def _begin(self, event: Stored, session: str | None) -> Any:
        adapter, _ = self._keys(event)
        tokens, extra = self._block(event)
        return self._classes.BlockStored(
            block_hashes=[event.hash],
            parent_block_hash=event.parent,
            token_ids=tokens,
            block_size=self._block_size,
            lora_id=self._adapter_ids.get(adapter) if adapter else None,
            medium="GPU",
            lora_name=adapter,
            extra_keys=[extra],
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
            session_id=session,
        )

    def _append(self, written: Any, event: Stored) -> None:
        tokens, extra = self._block(event)
        written.block_hashes.append(event.hash)
        written.token_ids.extend(tokens)
        written.extra_keys.append(extra)

    @staticmethod
    def _keys(event: Stored) -> tuple[str | None, str | None]:
        if not event.namespace:
            return None, None
        adapter, salt = json.loads(event.namespace)
        return adapter, salt

    def _block(self, event: Stored) -> tuple[list[int], tuple[Any, ...] | None]:
        """The block's tokens in vLLM's ids, and its extra keys in vLLM's order."""
        adapter, salt = self._keys(event)
        positions = [self._images.placeholder(token) for token in event.tokens]
        tokens = [
            token if image is None else image.token
            for token, image in zip(event.tokens, positions, strict=True)
        ]
        images = dict.fromkeys(
            (image.identifier, image.offset) for image in positions if image and image.identifier
        )
        keys: list[Any] = [*([adapter] if adapter else []), *images]
        if salt and event.parent is None:
            keys.append(salt)
        return tokens, tuple(keys) or None
