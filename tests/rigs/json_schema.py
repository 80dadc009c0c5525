"""Holds a JSON document against a JSON Schema, by those keywords that our schemas have; any other is refused."""

import json
import re
from importlib.resources import files
from typing import Any

TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
ANNOTATIONS = {"$schema", "$defs", "title", "description"}
KEYWORDS = ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "items", "enum", "anyOf", "$ref", "minimum", "maximum",
    "pattern",
}  # fmt: skip


def schema(name: str) -> dict[str, Any]:
    """One that the package has."""
    return json.loads((files("gpunetio.cli") / "schemas" / f"{name}.json").read_text())


def mistakes(document: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, at: str = "$") -> list[str]:
    """What in the document is not as the schema says, and where."""
    root = root or schema
    assert not (unknown := schema.keys() - KEYWORDS), f"{at}: this file does not know {unknown}"
    if "$ref" in schema:
        return mistakes(document, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, at)
    if "anyOf" in schema:
        found = [mistakes(document, one, root, at) for one in schema["anyOf"]]
        return [] if [] in found else [f"{at}: none of anyOf", *min(found, key=len)]
    if "enum" in schema and document not in schema["enum"]:
        return [f"{at}: {document!r} is none of {schema['enum']}"]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(document, kind) for kind in kinds):
        return [f"{at}: {document!r} is no {' or '.join(kinds)}"]
    if isinstance(document, dict):
        return _of_object(document, schema, root, at)
    if isinstance(document, list) and "items" in schema:
        return [m for n, one in enumerate(document) for m in mistakes(one, schema["items"], root, f"{at}[{n}]")]
    if isinstance(document, str) and not re.search(schema.get("pattern", ""), document):
        return [f"{at}: {document!r} does not match {schema['pattern']}"]
    if _is(document, "number") and not schema.get("minimum", document) <= document <= schema.get("maximum", document):
        return [f"{at}: {document} is out of range"]
    return []


def _is(document: Any, kind: str) -> bool:
    return isinstance(document, TYPES[kind]) and (kind == "boolean" or not isinstance(document, bool))


def _of_object(document: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    found = [f"{at}: {name} is missing" for name in schema.get("required", ()) if name not in document]
    for name, value in document.items():
        inner = known.get(name, rest)
        if inner is False:
            found.append(f"{at}: {name} is not in the schema")
        elif inner is not True:
            found += mistakes(value, inner, root, f"{at}.{name}")
    return found
