"""Check documents that commands print against the schemas in the package."""

import json
from importlib.resources import files
from typing import Any

import pytest

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

# The meta-schema, except that an unknown keyword is a mistake: such a keyword would check nothing.
STRICT = {
    "$schema": _DIALECT,
    "$id": "urn:gpunetio:strict",
    "$dynamicAnchor": "meta",  # also applies to the schemas inside a schema
    "$ref": _DIALECT,
    "unevaluatedProperties": False,
}


def schema(name: str) -> dict[str, Any]:
    """One that the package has."""
    return json.loads((files("gpunetio.cli") / "schemas" / f"{name}.json").read_text())


def mistakes(document: Any, schema: dict[str, Any]) -> list[str]:
    """What in the document is not as the schema says, and where."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (extra 'dev')")
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]
