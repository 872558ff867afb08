"""A record as JSON, and back: strictly by the type of each column, so that what is not changed stays as it was.

=====================================  =====================================================================
Arrow type                             JSON
=====================================  =====================================================================
boolean, integers, floats              ``true``, a number; ``"NaN"``, ``"Infinity"``, ``"-Infinity"``
decimal                                text: ``"12.50"`` (a number is taken too)
string                                 text; what is not UTF-8 as bytes
binary                                 text, if it is UTF-8 without control characters; ``{"base64": "…"}``
timestamp, date, time                  ISO 8601, with a zone in UTC (``…Z``); what no calendar has: a whole number
duration                               a whole number of the type's unit
list                                   an array
struct                                 an object with every field
map                                    an array of ``[key, value]``
month-day-nano interval                an array of three whole numbers
=====================================  =====================================================================
"""

from __future__ import annotations

from ftlayer.monitor.row_json.reading import json_of_column as json_of_column
from ftlayer.monitor.row_json.reading import json_of_row as json_of_row
from ftlayer.monitor.row_json.reading import row_of_json as row_of_json
from ftlayer.monitor.row_json.reading import value_of_text as value_of_text
