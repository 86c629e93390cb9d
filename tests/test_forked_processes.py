from pathlib import Path

import pytest

FILE = """
import os, time, warnings
import pytest

@pytest.fixture(scope="session")
def shared(request):
    yield
    (request.config.rootpath / f"left-{os.getpid()}").write_text("")

@pytest.mark.parametrize("number", range(4))
def test_passes(number, shared, tmp_path):
    (tmp_path / "file").write_text("")

def test_fails(shared):
    print("printed before")
    assert 1 == 2

def test_is_killed():
    os.kill(os.getpid(), 9)

@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(60)

def test_is_skipped():
    pytest.skip("no reason")

def test_warns(shared):
    warnings.warn("a warning")

def test_lacks_a_fixture(absent):
    pass
"""


def test_every_test_is_reported_once_whatever_happens_to_its_process(
    pytester: pytest.Pytester,
) -> None:
    support = Path(__file__).parent
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(support)!r})\npytest_plugins = ['support.suite.forked_processes']"
    )
    pytester.makepyfile(test_one=FILE, test_two=FILE)
    result = pytester.runpytest_subprocess("--processes=3", "-p", "no:cacheprovider", "-ra")
    result.assert_outcomes(passed=10, failed=6, errors=2, skipped=2, warnings=2)
    result.stdout.fnmatch_lines(
        [
            "*printed before*",
            "*its process ended with status -9*",
            "FAILED *test_hangs - Failed: Timeout*",
        ]
    )
    assert list(pytester.path.glob("left-*"))
