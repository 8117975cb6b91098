"""gradwire.toml: what is read, and what is said of what cannot be."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import configuration
from gradwire.configuration import Load, parse, read
from gradwire.fleet import spec_of
from gradwire.toml_lines import lines_of
from gradwire_wire.errors import UsageError

FOLDER = Path("/project/config")

WHOLE = """\
name = "digits"
allow = ["models.*", "physics.py:*"]

[workers.encoder]
framework = "torch"          # a comment with = and [brackets]
python = "../envs/torch/bin/python"
env = { OMP_NUM_THREADS = 1, NOTE = "a # b" }
path = [
    "models",
    "/shared/models",
]
cwd = "run"
threads = 2
device = "cpu"
start_timeout = 30
restart = "on-failure"

[workers.encoder.modules.net]
target = "models:make_net"
args = [3, [1.5, true]]
kwargs = { depth = 3 }

[workers.encoder.functions]
energy = "physics.py:energy"

[workers.head]
framework = "jax"
python = "3.11"
x64 = true
"""


def complaint(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(text, "gradwire.toml", FOLDER)
    return str(caught.value)


def worker(lines: str) -> str:
    return f'[workers.w]\nframework = "numpy"\n{lines}\n'


def test_a_whole_file() -> None:
    made = parse(WHOLE, "gradwire.toml", FOLDER)
    encoder, head = made.workers["encoder"], made.workers["head"]
    assert (made.name, made.allow, list(made.workers)) == (
        "digits",
        ["models.*", "physics.py:*"],
        ["encoder", "head"],
    )
    assert encoder.python == "/project/envs/torch/bin/python"
    assert encoder.env == {"OMP_NUM_THREADS": "1", "NOTE": "a # b"}
    assert encoder.path == ["/project/config/models", "/shared/models"]
    assert (encoder.cwd, encoder.threads, encoder.device) == ("/project/config/run", 2, "cpu")
    assert (encoder.start_timeout, encoder.restart) == (30.0, "on-failure")
    assert encoder.loads == {
        "net": Load("module", "models:make_net", [3, [1.5, True]], {"depth": 3}),
        "energy": Load("function", "physics.py:energy"),
    }
    assert (head.python, head.x64, head.path, head.cwd) == ("3.11", True, [str(FOLDER)], str(FOLDER))
    assert (head.threads, head.restart, head.loads) == (None, "never", {})


def test_defaults_of_the_file() -> None:
    made = parse(worker(""), "pipelines/train.toml", FOLDER)
    assert (made.name, made.allow, made.address) == ("train", None, None)


def test_a_broker_elsewhere() -> None:
    made = parse('address = "tcp://host:5555"\nkeys = "keys/me"', "far.toml", FOLDER)
    assert (made.address, made.keys, made.workers) == ("tcp://host:5555", "/project/config/keys/me", {})


@pytest.mark.parametrize(
    ("text", "line", "key", "says"),
    [
        (worker("framwork = 1"), 3, "workers.w.framwork", "did you mean 'framework'"),
        (worker("colour = 1"), 3, "workers.w.colour", "there are framework, python"),
        ("[workers.w]\n\npython = '3.11'", 1, "workers.w", "framework is missing"),
        (
            '[workers.w]\nframework = "pytorch"',
            2,
            "workers.w.framework",
            "'numpy', not 'pytorch'; did you mean 'torch'?",
        ),
        (worker("threads = 0"), 3, "workers.w.threads", "from 1 up, not 0"),
        (worker("threads = true"), 3, "workers.w.threads", "from 1 up, not True"),
        (worker("x64 = 1"), 3, "workers.w.x64", "true or false"),
        (worker("path = 'a'"), 3, "workers.w.path", "a list of texts"),
        (worker("start_timeout = inf"), 3, "workers.w.start_timeout", "seconds"),
        (worker("env = ['A=1']"), 3, "workers.w.env", "a table"),
        (
            worker("env = {\n A = 1979-05-27 }"[:0] + "env = { A = 1979-05-27 }"),
            3,
            "workers.w.env",
            "a table",
        ),
        (worker("restart = 'onfailure'"), 3, "workers.w.restart", "did you mean 'on-failure'"),
        (worker("\n\nrequirements = 'jax'"), 5, "workers.w.requirements", "a list"),
        (worker("requirements = ['jax']\npython = './bin/python'"), 4, "workers.w.python", "a version"),
        (worker("modules.net = 'net'"), 3, "workers.w.modules.net.target", "'pkg.mod:attr'"),
        (
            worker("[workers.w.modules.net]\ntarget = 'm:a'\narg = []"),
            5,
            "workers.w.modules.net.arg",
            "did you mean 'args'",
        ),
        (worker("[workers.w.modules.net]\nargs = []"), 3, "workers.w.modules.net", "target is missing"),
        (worker("functions.f = {target = 'm:f', args = []}"), 3, "workers.w.functions.f.args", "no such key"),
        (worker("modules.f = 'm:f'\nfunctions.f = 'm:g'"), 4, "workers.w.functions.f", "the same name"),
        (worker("modules.net = {target = 'm:f', args = [1979-05-27]}"), 3, "workers.w.modules", "a date"),
        ('[workers."a b"]\nframework = "numpy"', 1, "workers.a b", "a name is made of"),
        ("# nothing\n[workers]\n", 2, "workers", "a table [workers.NAME]"),
        ("[workers]\nw = 'torch'", 2, "workers.w", "a table [workers.NAME]"),
        (worker("") + "[worker.v]\nframework = 'numpy'", 4, "worker", "did you mean 'workers'"),
        ("address = 'ipc://x'\n" + worker(""), 1, "address", "not both"),
        ("keys = 'k'\n" + worker(""), 1, "keys", "belong to an address"),
        ("name = 'a/b'\n" + worker(""), 1, "name", "a name is made of"),
        (worker("allow = ['a']"), 3, "workers.w.allow", "no such key"),
        ("allow = 'models.*'\n" + worker(""), 1, "allow", "a list of texts"),
    ],
)
def test_a_complaint_names_line_and_key(text: str, line: int, key: str, says: str) -> None:
    message = complaint(text)
    assert message.startswith(f"gradwire.toml, line {line}: {key}")
    assert says in message


def test_what_is_no_toml_is_said_with_its_place() -> None:
    assert complaint("[workers.w]\nframework = torch").startswith(
        "gradwire.toml, line 2, column 13: not TOML"
    )


def test_an_empty_file_says_what_to_write() -> None:
    assert "[workers.NAME]" in complaint("")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.toml cannot be read: No such file"):
        read(tmp_path / "nowhere.toml")


def test_a_file_with_a_mark_at_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf[workers.w]\nframework = 'numpy'\n")
    assert list(read(tmp_path / "marked.toml").workers) == ["w"]


def test_a_folder_that_is_not_there_is_named_with_its_worker(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[workers.w]\nframework = 'numpy'\npath = ['src']\n")
    entry = read(tmp_path / "bad.toml").workers["w"]
    with pytest.raises(UsageError, match=f"worker 'w': path: there is no folder {tmp_path}/src"):
        spec_of(entry, lasts=False)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UsageError, match="not UTF-8"):
        read(tmp_path / "bad.toml")


@pytest.mark.parametrize("page", ["README.md", "docs/reference/configuration.md"])
def test_files_of_the_documentation_are_right(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    assert blocks
    for block in blocks:
        assert parse(block, page, FOLDER).workers["encoder"].loads["net"].kind == "module"


def test_the_page_has_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/configuration.md").read_text()
    for key in (*configuration._TOP, *configuration._WORKER):
        assert re.search(rf"^\| .*`{key}(\.NAME)?`", page, re.M), key


# ---- Lines ---------------------------------------------------------------------------------------------------------

TRICKY = '''\
a = """
b = 1
[c]
"quoted\\""""
'd.e' . "f" = [ # ] not the end
  "]", { g = "}" },
]
[ h . "i.j" ]
k = \'\'\'x = '1\'\'\'
l.m = 2
[[n]]
o = 1
[[n]]
p = {q = 1, r = [
1]}
s = 3
'''


def test_lines_of_what_looks_like_something_else() -> None:
    assert lines_of(TRICKY) == {
        ("a",): 1,
        ("d.e",): 5,
        ("d.e", "f"): 5,
        ("h",): 8,
        ("h", "i.j"): 8,
        ("h", "i.j", "k"): 9,
        ("h", "i.j", "l"): 10,
        ("h", "i.j", "l", "m"): 10,
        ("n",): 11,
        ("n", "o"): 12,
        ("n", "p"): 14,
        ("n", "s"): 16,
    }
    assert tomllib.loads(TRICKY)["h"]["i.j"]["l"] == {"m": 2}


_TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
_VALUES = st.one_of(
    st.integers(-9, 9).map(str),
    _TEXTS.map(lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'),
    _TEXTS.map(lambda text: f"'''\n{text.replace(chr(39), '')}\n'''"),
    st.lists(st.integers(0, 9)).map(lambda items: "[\n" + ",\n".join(map(str, items)) + "]"),
)


@given(st.lists(st.tuples(st.booleans(), _VALUES), max_size=8))
def test_every_key_is_found_where_it_was_written(entries: list[tuple[bool, str]]) -> None:
    text, expected, table = "", {}, ()
    for number, (is_header, value) in enumerate(entries):
        line = text.count("\n") + 1
        if is_header:
            table = (f"t{number}",)
            text += f"[t{number}] # {value!r}\n"
            expected[table] = line
        else:
            expected[(*table, f"k{number}")] = line
            text += f"k{number} = {value}\n"
    _exists(tomllib.loads(text), expected)
    assert lines_of(text) == expected


def _exists(document: dict[str, Any], keys: dict[tuple[str, ...], int]) -> None:
    for key in keys:
        here: Any = document
        for part in key:
            here = here[part]
