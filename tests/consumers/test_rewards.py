"""Built-in rewards: right values, and bounded on texts made to hurt."""

import os
import time
from typing import Any

import numpy as np
import pytest

from consumers.rewards import BUILT_INS, NotScored, RewardInput, Scored, code_tests
from consumers.rewards.types import judge


def sample(response: str = "", label: Any = None, **metadata: Any) -> RewardInput:
    return RewardInput(
        uid="0-0/0/0", group_id="0-0", index=0, response=response, label=label, metadata=metadata
    )


def score(name: str, response: str, label: Any = None, **metadata: Any) -> Any:
    return BUILT_INS[name](sample(response, label, **metadata))


# ---------------------------------------------------------------- exact
@pytest.mark.parametrize(
    ("response", "label", "options", "reward"),
    [
        (" Paris\n", "Paris", {}, 1),
        ("paris", "Paris", {}, 0),
        ("paris", "Paris", {"ignore_case": True}, 1),
        ("New  York", "New York", {}, 0),
        ("New \n York", "New York", {"whitespace": "collapse"}, 1),
        ("[1, 2]", "[1,2]", {"whitespace": "remove"}, 1),
        ("x ", "x", {"whitespace": "keep"}, 0),
        ("b", ["a", "b"], {}, 1),
        ("4", 4, {}, 1),
        ("", "x", {}, 0),
    ],
)
def test_exact_compares_the_whole_response(response, label, options, reward):
    assert score("exact", response, label, **options) == reward


@pytest.mark.parametrize("name", ["exact", "numeric", "regex", "code_tests"])
def test_a_task_without_what_the_reward_needs_is_an_error_and_never_a_0(name):
    with pytest.raises(ValueError, match=r"0-0/0/0.*needs"):
        score(name, "x")


# ---------------------------------------------------------------- numeric
@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("The answer is 42.", "42", 1),
        ("first 42, then 7", "42", 0),
        ("so \\boxed{42} as 7 says", "42", 1),
        ("\\boxed{1} no: \\boxed{\\frac{3}{4}}", "0.75", 1),
        ("\\boxed{\\dfrac{-3}{4}}", "-3/4", 1),
        ("-\\frac34", "-0.75", 1),
        ("2\\frac{1}{2}", "2.5", 1),
        ("1 1/2 cups", "3/2", 1),
        ("12 apples\n#### 1,234,567", 1234567, 1),
        ("$1,234.50", 1234.5, 1),
        ("1{,}000", "1000", 1),
        ("50%", "0.5", 1),
        ("50\\%", "50", 1),
        ("0.5", "50%", 1),
        ("0.5%", "50%", 0),
        ("1.5e3", "1500", 1),
        ("1.5 \\times 10^{3}", "1500", 1),
        ("10^-2", "0.01", 1),
        ("−3", "-3", 1),
        ("7-3", "3", 1),  # a minus between numbers is no sign
        ("0.333333333", "1/3", 1),
        ("0.33", "1/3", 0),
        ("10000001", "10000000", 0),  # whole numbers must be equal, however close
        ("1e999999999", "1e999999999", 1),
        ("1e999999999", "1e999999998", 0),
        ("-1e999999999", "1e999999999", 0),
        ("1e-999999999", "0", 0),
        ("1e99999999999999999999", "1", 0),
        ("3/0", "3", 0),
        ("no number", "3", 0),
        ("", "0", 0),
        ("#### the gold is 18", "reasoning 5 + 13\n#### 18", 1),
        ("\\boxed{x + 1}", "x+1", 1),
        ("\\boxed{x + 2}", "x+1", 0),
        ("\\boxed{2}", "2x", 0),
        ("\\boxed{12\\text{ cm}}", "12 cm", 1),
        ("\\boxed{(1, 2)}", "(1,2)", 1),
        ("\\boxed{2}", "(1,2)", 0),
        ("0.1", 0.1, 1),
        ("3", 3, 1),
        ("\\boxed{", "3", 0),
    ],
)
def test_numeric_finds_and_compares_the_answer(response, label, reward):
    assert score("numeric", response, label) == reward


def test_numeric_tolerance_also_holds_for_whole_numbers_once_it_is_asked_for():
    assert score("numeric", "103", "100") == 0
    assert score("numeric", "103", "100", rel_tol=0.05) == 1
    assert score("numeric", "103", "100", abs_tol=2) == 0
    assert BUILT_INS["numeric"](sample("103", "100"), abs_tol=3) == 1


@pytest.mark.parametrize(
    "text",
    [
        "7" * 10**6,
        "7," * 5 * 10**5,
        "123,456" * 10**5,
        "1" + ",234" * 2 * 10**5 + "5",
        "1e" + "9" * 10**6,
        "1e" + "0" * 10**6 + "1",
        "." * 10**6,
        "1." * 5 * 10**5,
        "\\boxed{" * 10**5,
        "{" * 10**6,
        "\\frac" * 2 * 10**5,
        "\\frac{1" * 10**5,
        " " * 10**6,
        "1 " * 5 * 10**5,
        "1/" * 5 * 10**5,
        "-" * 10**6,
        "####" * 10**5,
        "9" * 10**5 + "/" + "9" * 10**5,
    ],
    ids=lambda text: f"{text[:8]}…",
)
def test_numeric_is_fast_on_a_million_characters_made_to_hurt(text):
    begun = time.perf_counter()
    assert score("numeric", text, "3") in (0.0, 1.0)
    assert score("numeric", "3", text) in (0.0, 1.0)
    assert time.perf_counter() - begun < 10


def test_numeric_compares_long_numbers_by_their_digits():
    long = "12345678901234567890" * 50
    assert score("numeric", long, long) == 1
    assert score("numeric", long + "1", long + "2") == 0
    assert score("numeric", long + ".0", long) == 1


# ---------------------------------------------------------------- regex, json
def test_regex_searches_or_matches_all():
    assert score("regex", "so:\nANSWER: 4", pattern=r"answer: \d", ignore_case=True) == 1
    assert score("regex", "Answer: 4!", pattern=r"Answer: \d", full_match=True) == 0
    assert BUILT_INS["regex"](sample("abc"), pattern="b") == 1


@pytest.mark.parametrize(
    ("response", "reward", "valid", "keys"),
    [
        ('{"name": "x", "age": 3}', 1, 1, 1),
        ('Here:\n```json\n{"name": "x", "age": 3}\n```\nDone.', 1, 1, 1),
        ('{"name": "x", "age": "3"}', 0, 1, 0.5),
        ('{"name": "x", "age": true}', 0, 1, 0.5),  # a boolean is no integer
        ('["name", "age"]', 0, 1, 0),
        ('{"name": "x", "age": 3', 0, 0, 0),
        ('{"name": "x", "age": NaN}', 0, 0, 0),
        ("[" * 100_000, 0, 0, 0),
        ('{"name": "x", "age": ' + "9" * 10_000 + "}", 1, 1, 1),
        ("", 0, 0, 0),
    ],
)
def test_json_format_wants_valid_json_with_the_required_keys(response, reward, valid, keys):
    got = score("json_format", response, required={"name": "string", "age": "integer"})
    assert got == {"reward": reward, "valid_json": valid, "keys": keys}


def test_json_format_takes_a_list_of_keys_and_refuses_an_unknown_type():
    assert score("json_format", '{"a": null}', required=["a"])["reward"] == 1
    assert score("json_format", "3")["reward"] == 1
    with pytest.raises(ValueError, match=r"required\.a = 'str'"):
        score("json_format", "3", required={"a": "str"})


# ---------------------------------------------------------------- code
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(1, 1) == 3"]


def code(response: str, tests: list[Any], **options: Any) -> dict[str, float]:
    return score("code_tests", response, tests=tests, **options)


def test_code_is_all_or_nothing_unless_partial_credit_is_asked_for():
    assert code(ADD, TESTS[:2]) == {"reward": 1, "tests": 2, "tests_passed": 2}
    assert code(ADD, TESTS)["reward"] == 0
    assert code(ADD, TESTS, partial_credit=True)["reward"] == pytest.approx(2 / 3)


def test_code_may_be_a_program_that_reads_stdin():
    tests = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "2 2", "stdout": "5"}]
    assert code("print(sum(map(int, input().split())))", tests, partial_credit=True)["reward"] == 0.5


def test_the_last_fenced_python_block_is_the_answer():
    text = f"First:\n```python\nadd = None\n```\nBetter:\n{ADD}\nRun it:\n```sh\nls\n```\n"
    assert code(text, TESTS[:2])["reward"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        "while True: pass",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise KeyboardInterrupt",
        "x = 'a' * (1 << 34)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "open('big', 'wb').write(b'0' * (1 << 26))",
        "import sys; [sys.stdout.write('x' * 10**6) for _ in iter(int, 1)]",
        "input()",
        "def f(: pass",
        "import os\nfor fd in range(3, 20):\n  try: os.write(fd, b'0 0\\n')\n  except OSError: pass\nos._exit(0)",
    ],
)
def test_code_that_fails_in_any_way_passes_no_test_and_ends_in_time(answer):
    begun = time.perf_counter()
    assert code(answer, ["assert True"], timeout_s=1.5) == {"reward": 0, "tests": 1, "tests_passed": 0}
    assert time.perf_counter() - begun < 5


def test_tests_before_a_hang_keep_their_credit():
    tests = ["assert add(1, 2) == 3", "while True: pass", "assert add(1, 2) == 3"]
    assert code(ADD, tests, timeout_s=1, partial_credit=True)["tests_passed"] == 1


def test_a_program_with_endless_output_is_cut_off():
    begun = time.perf_counter()
    got = code("while True: print('x' * 1000)", [{"stdin": "", "stdout": "x"}], timeout_s=30)
    assert got["reward"] == 0
    assert time.perf_counter() - begun < 10


def test_code_sees_an_empty_folder_and_no_secrets(monkeypatch):
    monkeypatch.setenv("API_KEY", "very secret")
    tests = ["import os; assert os.listdir('.') == []", "assert 'API_KEY' not in os.environ"]
    assert code("", tests)["reward"] == 1


def test_nothing_that_the_code_started_outlives_it(tmp_path):
    note = tmp_path / "pids"
    answer = (
        "import os, time\n"
        "for leave in (lambda: None, os.setsid):\n"
        "    if os.fork() == 0:\n"
        "        leave()\n"
        f"        os.write(os.open({str(note)!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY), b'%d\\n' % os.getpid())\n"
        "        while True: pass\n"
        f"while not os.path.exists({str(note)!r}) or open({str(note)!r}).read().count('\\n') < 2: time.sleep(0.01)\n"
    )
    limits = code_tests.Limits(processes=100_000)  # root has no limit anyway
    assert code_tests._run_statements(answer, ["assert True"], limits, time.monotonic() + 10) in (0, 1)
    pids = [int(line) for line in note.read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.skipif(os.geteuid() == 0, reason="the kernel does not limit root's processes")
def test_code_cannot_fork():
    assert code("import os; os.fork()", ["assert True"])["reward"] == 0


def is_running(pid: int) -> bool:
    """True unless gone or a zombie, which whoever adopted it may not have collected yet."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(holds, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "not so within the deadline"
        time.sleep(0.01)


# ---------------------------------------------------------------- what a result becomes
@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array([2.0]), 2.0),
        (np.array(3), 3.0),
        ({"reward": 4}, 4.0),
    ],
)
def test_a_number_in_any_form_is_a_reward(result, reward):
    assert judge(result, 0.0) == Scored(reward, {}, 0.0)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "reward_missing"),
        ({"score": 1.0}, "reward_missing"),
        ({"reward": None}, "reward_missing"),
        (float("nan"), "reward_nonfinite"),
        (float("inf"), "reward_nonfinite"),
        (10**400, "reward_nonfinite"),
        ({"reward": float("nan")}, "reward_nonfinite"),
        ("1.0", "reward_error"),
        (1j, "reward_error"),
        ([1.0, 2.0], "reward_error"),
        (np.array([1.0, 2.0]), "reward_error"),
    ],
)
def test_what_is_no_finite_number_is_no_reward(result, reason):
    outcome = judge(result, 0.0)
    assert isinstance(outcome, NotScored) and outcome.reason == reason


def test_components_keep_the_finite_numbers():
    got = judge({"score": 1, "acc": True, "nan": float("nan"), "pred": "x", "none": None}, 0.0, "score")
    assert got == Scored(1.0, {"acc": 1.0}, 0.0)
