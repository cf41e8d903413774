"""Schemas of custom resources, with the fields of their public APIs that the files here may use.

kubernetes-validate has none of them.

InferencePool: reference of inference.networking.k8s.io/v1, gateway-api-inference-extension v1.3.
HTTPRoute: reference of gateway.networking.k8s.io/v1.
"""

from __future__ import annotations

from typing import Any

import jsonschema


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others. required: names, separated by spaces."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def list_of(items: Any, **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


TEXT = {"type": "string", "minLength": 1}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
METADATA = closed("name", name=TEXT, labels=LABELS, annotations=LABELS)


def document(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    fixed = {"apiVersion": {"const": api_version}, "kind": {"const": kind}}
    return closed("apiVersion kind metadata spec", **fixed, metadata=METADATA, spec=spec)


INFERENCE_POOL = document(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    closed(
        "selector targetPorts endpointPickerRef",
        selector=closed("matchLabels", matchLabels=LABELS),
        targetPorts=list_of(closed("number", number=PORT), minItems=1, maxItems=8),
        endpointPickerRef=closed(
            "name",
            group={"type": "string"},
            kind=TEXT,
            name=TEXT,
            port=closed("number", number=PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
)

HTTP_ROUTE = document(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    closed(
        parentRefs=list_of(closed("name", name=TEXT, namespace=TEXT, sectionName=TEXT)),
        hostnames=list_of(TEXT),
        rules=list_of(
            closed(
                matches=list_of(
                    closed(path=closed(type={"enum": ["PathPrefix", "Exact"]}, value=TEXT))
                ),
                backendRefs=list_of(closed("name", group=TEXT, kind=TEXT, name=TEXT, port=PORT)),
                timeouts=closed(
                    request={"pattern": r"^\d+(ms|s|m|h)$"},
                    backendRequest={"pattern": r"^\d+(ms|s|m|h)$"},
                ),
            )
        ),
    ),
)

SCHEMAS = {
    "InferencePool": INFERENCE_POOL,
    "HTTPRoute": HTTP_ROUTE,
}


def validate_custom(document: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    jsonschema.Draft202012Validator(SCHEMAS[document["kind"]]).validate(document)
