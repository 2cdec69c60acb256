"""Forms that recurse deeply, or take long, neither end the process nor keep it from other work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support_grammar import END, grammars, letters

from leadout.errors import EngineError, UsageError
from leadout.runtime import aside
from leadout.runtime import grammars as compiling
from leadout.runtime.aside import Aside
from leadout.runtime.settings import Settings

ABC = letters(f"a b c {END}")
DEEP = """
import threading
from support_grammar import END, grammars, letters
from leadout.runtime.settings import Settings

count, made = 6000, grammars(letters(f"a [ c {END}"))
links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)} | {f"a{count}": {"type": "array"}}
lark = "start: a0\\n" + "".join(f"a{i}: a{i + 1}\\n" for i in range(count)) + f'a{count}: "ab"'

def ask():
    for asked in ({"grammar": lark}, {"json_schema": {"$defs": links, "$ref": "#/$defs/a0"}}):
        grammar = made.of(Settings(**asked), [3])
        print([token for token in range(4) if grammar.allows(token, [])])
    made.forget()

threading.stack_size(2**18)
thread = threading.Thread(target=ask)
thread.start()
thread.join()
"""


def ran(program: str) -> str:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_chains_of_thousands_of_rules_compile_whatever_stack_the_caller_has():
    assert ran(DEEP) == "[0]\n[1]\n"


def test_a_process_waits_a_moment_for_what_returns_to_it():
    """A thread that comes back from Rust to an interpreter which has ended would crash it."""
    said = (
        "import time; from leadout.runtime.aside import Aside; Aside(lambda: time.sleep(0.2) or print('over'), 2**20)"
    )
    assert ran(said) == "over\n"


def test_what_runs_aside_comes_back_or_is_raised_and_leaves_other_threads_their_stacks(monkeypatch):
    before = threading.stack_size(2**20)
    try:
        made = Aside(lambda: (threading.current_thread().name, 1), 2**22 + 1)
        assert made.wait(9) and made.wait(0) and made.result() == made.result() == ("leadout aside", 1)
        failed = Aside(lambda: 1 // 0, 2**22)
        assert failed.wait(9)
        with pytest.raises(ZeroDivisionError):
            failed.result()
        monkeypatch.setattr(threading.Thread, "start", lambda self: exec("raise RuntimeError"))
        with pytest.raises(EngineError, match="no thread with a stack of 5 MiB could be started"):
            Aside(lambda: 1, 2**22 + 1)
        assert threading.stack_size() == 2**20
    finally:
        threading.stack_size(before)


def test_what_takes_too_long_is_refused_keeps_nobody_waiting_and_is_kept_once_it_is_done(monkeypatch):
    made, begun, goes_on = grammars(ABC), [], threading.Event()
    kept = made.of(Settings(regex="ab"), [3])
    check = compiling.Grammar.check
    monkeypatch.setattr(compiling.Grammar, "check", lambda self: begun.append(goes_on.wait(9)) or check(self))
    monkeypatch.setattr(compiling, "_SECONDS", 0.0)
    for _ in range(2):
        with pytest.raises(UsageError, match="regex takes llguidance more than 0 seconds to compile"):
            made.of(Settings(regex="ba"), [3])
    monkeypatch.setattr(compiling, "_SECONDS", 9.0)
    found = []
    waiting = threading.Thread(target=lambda: found.append(made.of(Settings(regex="ba"), [3])))
    waiting.start()
    assert made.of(Settings(regex="ab"), [3]) is not kept, "another copy, and at once"
    monkeypatch.setattr(aside, "_AT_EXIT", 0.01)
    aside._leave()
    goes_on.set()
    waiting.join()
    assert found[0].allows(1, []) and made.of(Settings(regex="ba"), [3]).allows(1, [])
    assert begun == [True], "compiled once"
    monkeypatch.setattr(compiling.Grammar, "check", check)
    made.of(Settings(regex="c"), [3])
    assert not made._compiling


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"json_schema": {"multipleOf": 100007}},
            "json_schema: the digits of multipleOf, .* at most 100000, not .*100007",
        ),
        ({"json_schema": {"items": [{"multipleOf": 0.0123456}]}}, "at most 100000, not those of 0.0123456"),
        ({"regex": "é" * 500_001}, "regex must be a text of at most 1000000 bytes, not of 1000002"),
    ],
    ids=["digits", "fraction", "bytes"],
)
def test_what_would_take_hours_is_refused_at_once(asked, message):
    with pytest.raises(UsageError, match=message):
        grammars(ABC).of(Settings(**asked), [3])


def test_steps_of_few_digits_are_compiled_and_values_are_no_steps():
    compiling.check_multiples('{"multipleOf": 2.50, "const": {"multipleOf": 100007}, "items": {"multipleOf": 1e-9}}')
    assert grammars(letters(f"a 0 1 {END}")).of(Settings(json_schema={"type": "integer", "multipleOf": 10**9}), [3])
