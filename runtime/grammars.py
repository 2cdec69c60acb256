"""Compiles, once for each tokenizer, the grammars that requests ask for: a JSON schema, a regular expression or a Lark
grammar, as llguidance reads them."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from threading import RLock
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from ..errors import EngineError, UsageError
from .aside import Aside
from .grammar import Compiled, Grammar, reason
from .settings import Settings
from .text import Codec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_KEPT = 32  # compiled grammars
_LONGEST = 1_000_000  # bytes of a grammar's text
# llguidance recurses from each rule or schema to those it names: up to 930 bytes of stack for a byte of text, on x86-64
_STACK, _STACK_A_BYTE = 2**24, 2048
_LARGEST = 100_000  # multiple: an automaton has a state for each remainder
_SECONDS = 30.0  # what it compiles in time takes one or two
_STAND_IN = "<|leadout: no end|>"
_UNSPELLED = "\U0010ffff"  # no character, and so in no text
_LITERAL = re.compile(r'"(\\.|[^"\\])*"|/(\\.|[^/\\])+/|//.*')  # or a comment, of a grammar in Lark
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NUMBER = re.compile(r"<\[(\d+)(?:[-,]\1)*\]>")  # of one token alone
_TEMPERATURE = re.compile(r"\[[^\]/\"]*\btemperature\s*=")


class Grammars:
    """Compiled grammars for one tokenizer; the last 32 are kept. llguidance is imported, and the tokenizer read, when
    the first is asked for. May be used from several threads."""

    def __init__(self, codec: Codec, size: int) -> None:
        """``size``: the length of the target's rows of logits; logits that belong to no token are forbidden."""
        self._codec, self._size = codec, size
        self._kept: OrderedDict[tuple[str, str, frozenset[int]], Compiled] = OrderedDict()
        self._tokenizers: dict[bool, tuple[frozenset[int], LLTokenizer, int | None]] = {}  # the last of each kind
        self._compiling: dict[tuple[str, str, frozenset[int]], Aside[Compiled]] = {}
        self._lock = RLock()  # a signal handler may ask, too, or make all be forgotten

    def of(self, settings: Settings, ends: Collection[int]) -> Grammar | None:
        """What ``settings`` ask for, before the first token of an answer that ends with one of ``ends``; None where
        they ask for none. Raises UsageError for what cannot be compiled, or not in time (that goes on until it is done,
        and is refused at once if it is asked for again), EngineError without llguidance."""
        if (asked := settings.asked_grammar) is None:
            return None
        key = (*asked, frozenset(ends))
        with self._lock:
            if (compiled := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return Grammar(compiled)
            self._compiling = {each: job for each, job in self._compiling.items() if each == key or not job.wait(0.0)}
            if (job := self._compiling.get(key)) is None:
                job = self._compiling[key] = self._compile(*key)
        if not job.wait(_SECONDS):  # with no lock held, for others may ask for what is kept
            raise UsageError(f"{key[0]} takes llguidance more than {_SECONDS:.0f} seconds to compile")
        with self._lock:
            self._compiling.pop(key, None)
            self._kept[key] = compiled = job.result()
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return Grammar(compiled)

    def forget(self) -> None:
        """Drop all that were asked for."""
        with self._lock:
            self._kept = OrderedDict()

    def _compile(self, name: str, text: str, ends: frozenset[int]) -> Aside[Compiled]:
        try:
            from llguidance import LLMatcher
        except ImportError:
            missing = f"{name} needs llguidance, which is not installed"
            raise EngineError(f"{missing}: pip install 'leadout[grammar]'") from None
        if (size := len(text.encode())) > _LONGEST:
            raise UsageError(f"{name} must be a text of at most {_LONGEST} bytes, not of {size}")
        if name == "json_schema":
            check_multiples(text)
        lark = _LITERAL.sub("", text) if name == "grammar" else ""
        if _TEMPERATURE.search(lark):
            raise UsageError("grammar: a rule has no temperature of its own: that is a setting of the request")
        reads: dict[str, Callable[[str], str]] = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        named = "<" in lark  # it may ask for a special token by its name
        tokenizer, stand_in = self._read(name, ends, named=named)
        for number in _NUMBER.findall(lark):  # llguidance writes more than its bytes, and takes these alone back
            if int(number) < self._size and not tokenizer.is_special_token(int(number)):
                raise UsageError(f"grammar: <[{number}]> asks for a token that is text by its number: write the text")

        def compiled() -> Compiled:
            try:
                matcher = LLMatcher(tokenizer, reads[name](text), log_level=0)
            except ValueError as error:
                raise UsageError(f"{name} cannot be compiled: {reason(str(error))}") from None
            if matcher.is_error():
                raise UsageError(f"{name} cannot be compiled: {reason(matcher.get_error())}")
            made = Compiled(name, matcher, self._size, ends, stand_in, named)
            Grammar(made).check()
            return made

        return Aside(compiled, _STACK + _STACK_A_BYTE * size)

    def _read(self, name: str, ends: frozenset[int], *, named: bool) -> tuple[LLTokenizer, int | None]:
        """The tokenizer as llguidance has it, for texts with these ends, and the id that stands for one if there is
        none. ``named`` as of ``Compiled``."""
        kept = self._tokenizers.get(named)
        if kept is None or kept[0] != ends:
            kept = self._tokenizers[named] = ends, *self._made(name, ends, named=named)
        return kept[1:]

    def _made(self, name: str, ends: frozenset[int], *, named: bool) -> tuple[LLTokenizer, int | None]:
        from llguidance import LLTokenizer

        text, stand_in, size = self._codec.tokenizer.to_str(), None, self._size
        if (ids := self._codec.vocab_size()) > size:
            raise UsageError(f"{name}: the tokenizer has {ids} ids, the target only {size}")
        if not ends:
            other = Tokenizer.from_str(text)
            other.add_special_tokens([_STAND_IN])
            text, stand_in = other.to_str(), other.get_vocab()[_STAND_IN]
            size = max(size, stand_in + 1)
        try:
            found = literal(json.loads(text))
            read = json.dumps(found if named else unspelled(found, ends))
            return LLTokenizer(read, n_vocab=size, eos_token=sorted(ends) if stand_in is None else stand_in), stand_in
        except ValueError as error:
            why = str(error)
        except BaseException as error:  # a panic of its own is no Exception
            if type(error).__name__ != "PanicException":
                raise
            why = f"panic: {error}"
        raise UsageError(f"{name}: llguidance cannot read this tokenizer: {reason(why)}")


def check_multiples(schema: str) -> None:
    """Raise UsageError for a ``multipleOf`` whose digits, without zeros at the end, are too large a number: llguidance
    would compile it for minutes or hours, and take gigabytes for it."""
    left = [json.loads(schema, parse_float=Decimal)]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += [each for key, each in value.items() if key not in ("const", "enum", "default", "examples")]
            if isinstance(step := value.get("multipleOf"), (int, Decimal)):
                digits = Decimal(step).as_tuple().digits
                if int("".join(map(str, digits)).rstrip("0") or 0) > _LARGEST:
                    raise UsageError(
                        f"json_schema: the digits of multipleOf, without zeros at the end, must be a number of at most"
                        f" {_LARGEST}, not those of {reason(str(step))}"
                    )


def literal(settings: dict[str, Any]) -> dict[str, Any]:
    """A ``tokenizer.json``, changed so that it cuts a text as it stands.

    Where a form leaves one text alone to go on with, llguidance takes this tokenizer's cut, and fails where that spells
    another text: normalised (NFC makes one letter of two), behind a space, or without those beside an added token. In
    Unigram's cut "<0x41>" is the byte of that name, unless that is less likely than its six letters are.
    """
    settings["normalizer"] = {"type": "Sequence", "normalizers": _marking(settings["normalizer"])}
    pre_tokenizers = [settings["pre_tokenizer"]]
    for each in pre_tokenizers:
        if each is not None and each["type"] == "ByteLevel":
            each["add_prefix_space"] = False
        pre_tokenizers += (each or {}).get("pretokenizers", ())
    for token in settings["added_tokens"]:
        token["lstrip"] = token["rstrip"] = False
    if (model := settings["model"])["type"] == "Unigram":
        lowest = 9 * min([0.0, *(score for _, score in model["vocab"])]) - 9
        model["vocab"] = [[name, lowest if _BYTE.fullmatch(name) else score] for name, score in model["vocab"]]
    return settings


def _marking(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Those normalizers that only write a text's spaces or bytes as the vocabulary does."""
    if normalizer is None:
        return []
    if normalizer["type"] == "Sequence":
        return [kept for each in normalizer["normalizers"] for kept in _marking(each)]
    of_spaces = normalizer["type"] == "Replace" and " " in normalizer["pattern"].values()
    return [normalizer] if of_spaces or normalizer["type"] == "ByteLevel" else []


def unspelled(settings: dict[str, Any], ends: Collection[int] = ()) -> dict[str, Any]:
    """A ``tokenizer.json``, changed: its special tokens, and added ones among ``ends``, have names that no text spells.

    Where a form leaves one text alone to go on with, llguidance cuts it by this, and would take "</s>" in it for the
    token, which ends the answer or is no text. For special it takes all added tokens in angle brackets.
    """
    for token in settings["added_tokens"]:
        token["special"] |= token["id"] in ends
    names = {name: f"{name[:-1]}{_UNSPELLED}{name[-1:]}" for name in map(_special, settings["added_tokens"]) if name}
    for token in settings["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = settings["model"]
    if isinstance(vocab := model["vocab"], dict):
        model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
    else:  # Unigram's: tokens with their scores
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return settings


def _special(token: Mapping[str, Any]) -> str:
    """The name of an added token that llguidance takes for special, else nothing."""
    name = str(token["content"])
    return name if token["special"] or (name.startswith("<") and name.endswith(">")) else ""
