"""JSON bodies of requests and responses, as pydantic models.

Types are strict: a boolean or a quoted number is not a number, and unknown members are refused. Limits that are
settings, and rules that concern several fields, are checked in `metaban.service.http.parsing`.
"""
