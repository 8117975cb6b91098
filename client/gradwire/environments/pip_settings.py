"""Where pip looks for packages, told to uv, which does not read what pip is configured with. Pure.

A machine that reaches its packages through a mirror says so to pip, in variables or files; who has uv as well should
not have to say it twice. What uv is told itself, by a variable or a ``uv.toml``, wins.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["config_files", "flags_for_uv", "pip_settings", "variables_for_uv"]

# setting of pip → variable of uv, what separates its values, and what of uv's says the same
_TOLD = {
    "index-url": ("UV_DEFAULT_INDEX", " ", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
    "extra-index-url": ("UV_INDEX", " ", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
    "find-links": ("UV_FIND_LINKS", ",", ("UV_FIND_LINKS",)),
    "trusted-host": ("UV_INSECURE_HOST", " ", ("UV_INSECURE_HOST",)),
    "constraint": ("UV_CONSTRAINT", " ", ("UV_CONSTRAINT",)),
    "cert": ("SSL_CERT_FILE", " ", ("SSL_CERT_FILE",)),
    "proxy": ("ALL_PROXY", " ", ("ALL_PROXY", "HTTPS_PROXY", "https_proxy", "all_proxy")),
}


def config_files(environment: Mapping[str, str], home: str) -> Iterator[str]:
    """The files pip reads, later ones win (without the one of its own environment)."""
    named = environment.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        return
    for folder in reversed((environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")):
        yield os.path.join(folder, "pip", "pip.conf")
    yield "/etc/pip.conf"
    yield os.path.join(home, ".pip", "pip.conf")
    yield os.path.join(environment.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "pip", "pip.conf")
    if named:
        yield named


def pip_settings(environment: Mapping[str, str], texts: Iterable[str]) -> dict[str, list[str]]:
    """Setting → values, from files (their texts in order of `config_files`) and ``PIP_…`` variables, which win."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(text)
        except configparser.Error:
            continue  # pip itself will say so when it is used
        for section in ("global", "install"):
            if parser.has_section(section):
                settings.update(
                    (name.replace("_", "-"), value.split()) for name, value in parser.items(section)
                )
    for name, value in environment.items():
        if name.startswith("PIP_") and value.strip():
            settings[name[4:].lower().replace("_", "-")] = value.split()
    return settings


def variables_for_uv(settings: Mapping[str, list[str]], environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment that uv runs in."""
    told = {}
    for name, (variable, separator, same) in _TOLD.items():
        values = settings.get(name)
        if values and not any(environment.get(other) for other in same):
            told[variable] = separator.join(values)
    if "UV_INDEX" in told and not environment.get("UV_INDEX_STRATEGY"):
        told["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip takes the best of all indexes, uv the first's
    return told


def flags_for_uv(settings: Mapping[str, list[str]]) -> list[str]:
    """What to add to ``uv pip install``: that for which uv has no variable."""
    said = " ".join(settings.get("no-index", [])).lower()
    return ["--no-index"] if said in ("1", "true", "yes", "on", "t", "y") else []
